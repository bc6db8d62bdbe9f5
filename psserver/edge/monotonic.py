"""The time that hosts tell their cores."""

import time


def now_ms() -> int:
    """Monotonic time."""
    return time.monotonic_ns() // 1_000_000
