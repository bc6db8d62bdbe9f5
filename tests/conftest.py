"""What holds for every test: markers that skip by themselves, a seed to repeat."""

import gc
import multiprocessing
import os
from pathlib import Path

import pytest

# Before anything imports torch, and for every process that a test starts: the threads
# of torch's own spin while they wait for each other, and on two cores a training step
# of a tiny model then takes 20 ms instead of 0.5.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As in a script, which imports psworker before grpc: a test that imports grpc first
# would have its handlers in forked children, such as a DataLoader's, and they crash.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


def pytest_runtest_logfinish() -> None:
    """Ends the processes of a test's loader, if a cycle of objects still holds it.

    They were forked, and hold copies of this process's pipes: who waits for the end of
    one would wait until the garbage is collected.
    """
    if multiprocessing.active_children():
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine can't run, and says why."""
    if any(item.get_closest_marker("gpu") for item in items):
        reason = _why_no_gpu()
        if reason:
            _skip(items, "gpu", reason)
    if os.geteuid() != 0:
        _skip(items, "root", "needs to be root")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Says how to get the order and the random numbers of a failed run again."""
    seed = config.getoption("randomly_seed", default=None)
    failed = terminalreporter.stats.get("failed") or terminalreporter.stats.get("error")
    if failed and seed is not None:
        terminalreporter.write_line(
            f"the same order again: pytest --randomly-seed={seed}"
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
