"""The nursery that the tests of the suite share."""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.doubles.children import Nursery

IMPORTED: Final = (
    "pandas",
    "sklearn.datasets",
    "sklearn.model_selection",
    "tests.conformance.mnist_in_memory",
)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery(*IMPORTED) as made:
        yield made
