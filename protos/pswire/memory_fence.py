"""Order of what a thread reads and writes in memory that another process has mapped.

On x86 loads and stores keep their order anyhow. On ARM a lock's acquisition holds back
what comes after it, and its release waits for what came before, but not the other way
round: two turns in a row keep both sides apart, at about 0.2 us.
"""

import threading
from typing import Final

_LOCK: Final = threading.Lock()


def fence() -> None:
    """What this thread has read and written is so before what it will."""
    for _ in range(2):
        with _LOCK:
            pass
