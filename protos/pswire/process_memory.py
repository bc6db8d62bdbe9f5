"""Memory of this process: how much it has, and that it keeps what messages free.

Messages of MiBs come and go. glibc gives the memory of a large message back to the
system when it is freed, and gets it anew, page by page and zeroed, for the next one: a
third of the processor time of a step of 64 MiB over TCP. Source:
https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

KEPT_BYTES: Final = 1 << 30
"""What is kept at most. The messages of a push live until it is answered, and the next
one takes as much again: the most that a process holds grows only by what fits none of
them, which `docs/memory.md` measures."""

_MAPPED_BYTES_MIN: Final = 32 << 20
"""Larger blocks are still mapped by themselves; the most that glibc takes."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_CHOSEN_BY_USER: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")

_STATM: Final = Path("/proc/self/statm")


def keep_freed_memory() -> bool:
    """Has glibc keep what is freed; whether it does.

    Nothing changes where the user has chosen, or where malloc is another one.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _CHOSEN_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    is_kept = mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES_MIN)
    return bool(is_kept and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def give_back_freed_memory() -> None:
    """Gives the system what is free between blocks that are kept.

    glibc would not use all of it again: a block that is aligned fits no hole that one
    of the same size has left. Nothing is done where malloc is another one.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Resident memory of this process, shared pages included; 0 where none says so.

    Source: https://man7.org/linux/man-pages/man5/proc_pid_statm.5.html
    """
    try:
        pages = int(_STATM.read_bytes().split()[1])
    except FileNotFoundError:  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
