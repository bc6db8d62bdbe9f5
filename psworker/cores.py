"""Processor cores that this process may use."""

import os


def usable_core_count() -> int:
    """Cores that this process may run on, which a container may limit."""
    if hasattr(os, "sched_getaffinity"):  # Not on macOS.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
