"""The time that hosts pass to their cores."""

import time


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
