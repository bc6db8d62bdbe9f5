"""What holds for every test: markers that skip by themselves, a seed to repeat."""

import gc
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.conformance.report import Row, table
from tests.fault.tally import Tally

if TYPE_CHECKING:
    from tests.doubles.children import Nursery

# Before anything imports torch, and for every process that a test starts: the threads
# of torch's own spin while they wait for each other, and on two cores a training step
# of a tiny model then takes 20 ms instead of 0.5.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Daemons of tests serve no pages but where a test is about them.
os.environ["PS_ADMIN_LISTEN"] = "off"

# As in a script, which imports psworker before grpc: a test that imports grpc first
# would have its handlers in forked children, such as a DataLoader's, and they crash.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

REPOSITORY = Path(__file__).resolve().parent.parent

LONGEST_FIRST: Final = (
    "conformance",
    "property",
    "integration/test_readme.py",
    "fault",
    "integration",
    "unit",
)
"""Folders and files in the order in which several processes take files from them: those
of minutes first, and the many short ones last, so that the processes end at the same
time."""


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def nursery() -> Iterator["Nursery"]:
    """Forks the processes of tests that are not of how a process starts."""
    from tests.doubles.children import Nursery  # imports torch, which is set up here

    with Nursery() as made:
        yield made


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Without what Python says of other tests' tasks when it comes to free them."""
    gc.collect()
    return caplog


def pytest_runtest_logfinish() -> None:
    """Ends the processes of a test's loader, if a cycle of objects still holds it.

    They were forked, and hold copies of this process's pipes: who waits for the end of
    one would wait until the garbage is collected.
    """
    if multiprocessing.active_children():
        gc.collect()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skips what this machine can't run, and says why; puts long files first."""
    if hasattr(config, "workerinput"):  # one of several processes of pytest-xdist
        items.sort(key=_turn)  # of one turn, the order stays: it was drawn
    if any(item.get_closest_marker("gpu") for item in items):
        reason = _why_no_gpu()
        if reason:
            _skip(items, "gpu", reason)
    if os.geteuid() != 0:
        _skip(items, "root", "needs to be root")


def pytest_collection_finish() -> None:
    """Leaves what was imported out of all collections of garbage to come."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints the tables, and how to get the order of a failed run again."""
    tally = Tally.of_all(_told(terminalreporter, "faults"))
    if tally is not None:
        terminalreporter.section("faults")
        terminalreporter.write_line(tally.text())
    rows = [Row(**values) for values in _told(terminalreporter, "conformance")]
    if rows:
        terminalreporter.section("conformance")
        for line in table(rows):
            terminalreporter.write_line(line)
    seed = config.getoption("randomly_seed", default=None)
    failed = terminalreporter.stats.get("failed") or terminalreporter.stats.get("error")
    if failed and seed is not None:
        terminalreporter.write_line(
            f"the same order again: pytest --randomly-seed={seed}"
        )


def _turn(item: pytest.Item) -> int:
    path = item.path.relative_to(REPOSITORY / "tests")
    places = {str(path), path.parts[0]}
    return next((n for n, name in enumerate(LONGEST_FIRST) if name in places), 0)


def _told(
    terminalreporter: pytest.TerminalReporter, name: str
) -> Iterator[dict[str, Any]]:
    """What tests have recorded under a name, in whichever process each of them ran."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":  # the last: it has all
                yield from (
                    value for key, value in report.user_properties if key == name
                )


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    return f"no CUDA device is visible to torch {torch.__version__}"
