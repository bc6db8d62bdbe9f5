"""What the tests of the suite share: the nursery, and the table at the end."""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.conformance.report import Row, table
from tests.fault.children import Nursery

ROWS: Final[list[Row]] = []
IMPORTED: Final = (
    "pandas",
    "sklearn.datasets",
    "sklearn.model_selection",
    "tests.conformance.mnist_in_memory",
)


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    return ROWS


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery(*IMPORTED) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("conformance")
        for line in table(ROWS):
            terminalreporter.write_line(line)
