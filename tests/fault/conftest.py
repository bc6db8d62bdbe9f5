"""What the fault tests share: jobs, whose faults are counted."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.doubles.children import Nursery
from tests.fault.fault_job import LEASE_S, FaultJob
from tests.fault.tally import Tally

SEED: Final = int(os.environ.get("FAULT_SEED", "20261128"))
"""Of where connections are cut. What processes do beside is not repeatable."""

MakeJob = Callable[..., FaultJob]


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Iterator[Tally]:
    """What the test's jobs count; `tests/conftest.py` prints the sum of all tests."""
    made = Tally(SEED, LEASE_S)
    yield made
    record_property("faults", made.as_values())


@pytest.fixture
def make_job(nursery: Nursery, tmp_path: Path, tally: Tally) -> MakeJob:
    """Makes the job of a test; entering it starts it, leaving it checks it."""

    def make(*options: str, **settings: Any) -> FaultJob:  # noqa: ANN401
        return FaultJob(nursery, tmp_path / "job", tally, options=options, **settings)

    return make
