"""Processor cores that this process may use, and their shares for several."""

import os
from collections.abc import Mapping
from typing import Final

THREADS_VARIABLE: Final = "OMP_NUM_THREADS"
"""How many threads torch computes with, in processes that are started with it."""


def usable_core_count() -> int:
    """Cores that this process may run on, which a container may limit."""
    if hasattr(os, "sched_getaffinity"):  # Not on macOS.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_share(process_count: int) -> int:
    """Threads for each of some processes that compute at the same time.

    Each would take all cores for itself: on two cores, two processes trained the digits
    in 25 s so, and in 11 s with one thread each.
    """
    return max(1, usable_core_count() // process_count)


def sharing_text(
    process_count: int, thread_count: int, inherited: Mapping[str, str]
) -> str:
    """How processes share the cores, for the log; empty if the user's environment says.

    Args:
        process_count: Processes that compute at the same time.
        thread_count: Threads for each of them.
        inherited: The user's environment.
    """
    if THREADS_VARIABLE in inherited:
        return ""
    core_count = usable_core_count()
    return (
        f"{process_count} processes share {core_count} "
        f"core{'s' if core_count > 1 else ''}, each with {THREADS_VARIABLE}="
        f"{thread_count}; set it for another share"
    )
