"""What the fault tests share: one nursery, one tally, and jobs."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fault.children import Nursery
from tests.fault.fault_job import LEASE_S, FaultJob
from tests.fault.tally import Tally

TALLY: Final = Tally()

SEED: Final = int(os.environ.get("FAULT_SEED", "20261128"))
"""Of where connections are cut. What processes do beside is not repeatable."""

MakeJob = Callable[..., FaultJob]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


@pytest.fixture
def make_job(nursery: Nursery, tmp_path: Path) -> MakeJob:
    """Makes the job of a test; entering it starts it, leaving it checks it."""

    def make(*options: str, **settings: Any) -> FaultJob:  # noqa: ANN401
        return FaultJob(nursery, tmp_path / "job", TALLY, options=options, **settings)

    return make


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY.job_count:
        terminalreporter.section("faults")
        terminalreporter.write_line(f"seed {SEED}\n\n{TALLY.text(LEASE_S)}")
