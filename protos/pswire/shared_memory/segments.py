"""Memory that two processes of one user on one machine map at the same time.

A segment is a file without a name (`memfd_create`), handed over as a descriptor:
nothing appears in `/dev/shm`, nobody else can open it, and it is gone with the last
mapping, whatever becomes of the processes. Its size is sealed, so that reading from a
mapping can't fail because the other side has cut it, and its maker alone writes to it.
Source: https://man7.org/linux/man-pages/man2/memfd_create.2.html and
https://man7.org/linux/man-pages/man2/F_GET_SEALS.2const.html
"""

import contextlib
import mmap
import os
import secrets
import sys
import threading
from pathlib import Path
from typing import Final

from pswire.shared_memory.layout import SegmentHeader, SegmentKind

if sys.platform == "linux":
    import fcntl

SHARED_MEMORY_VARIABLE: Final = "PS_SHARED_MEMORY"
"""Environment variable that switches shared memory off with `0`, on either side."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; Python knows its name from 3.13 on


_LOCK: Final = threading.Lock()


def fence() -> None:
    """What this thread has read and written is so before what it will.

    On x86 loads and stores keep their order anyhow. On ARM a lock's acquisition holds
    back what comes after it, and its release waits for what came before, but not the
    other way round: two turns in a row keep both sides apart, at about 0.2 us.
    """
    for _ in range(2):
        with _LOCK:
            pass


class SegmentError(Exception):
    """A segment can't be made or mapped; the text says why."""


def is_wanted(setting: str) -> bool:
    """Whether a value of `PS_SHARED_MEMORY` leaves shared memory on."""
    return setting.strip().lower() not in {"0", "false", "no", "off"}


def boot_id() -> str:
    """Which start of which machine this is; empty where shared memory can't be used."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return ""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class MemorySegment:
    """A segment that this process has mapped.

    Attributes:
        header: What it begins with.
        data: All of it. Read-only where another process has made it. Views of it keep
            the mapping alive.
    """

    def __init__(
        self, header: SegmentHeader, data: memoryview, descriptor: int | None = None
    ) -> None:
        """Takes over a mapping; `create` and `adopt` make them."""
        self.header = header
        self.data = data
        self._descriptor = descriptor

    @classmethod
    def create(cls, kind: SegmentKind, byte_count: int) -> "MemorySegment":
        """A new segment of zeros, to be written to by this process alone.

        Raises:
            SegmentError: The system has no such memory.
        """
        if sys.platform != "linux":
            raise SegmentError(f"{sys.platform} has no memfd_create")
        header = SegmentHeader(kind, secrets.randbits(63) | 1, byte_count)
        try:
            descriptor = os.memfd_create(
                f"paramserver-{kind.name.lower()}",
                os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,
            )
        except OSError as error:
            raise SegmentError(f"memfd_create failed: {error}") from None
        try:
            os.ftruncate(descriptor, byte_count)
            mapping = mmap.mmap(descriptor, byte_count)
            mapping[: len(header.pack())] = header.pack()
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise SegmentError(
                f"a segment of {byte_count} bytes can't be made: {error}"
            ) from None
        return cls(header, memoryview(mapping), descriptor)

    @classmethod
    def adopt(cls, header: SegmentHeader, descriptor: int) -> "MemorySegment":
        """Maps a segment that another process has made, to be read.

        Args:
            header: What it should be.
            descriptor: As it was received. Closed here in any case.

        Raises:
            SegmentError: It is something else, or its size could change.
        """
        if sys.platform != "linux":
            raise SegmentError(f"{sys.platform} has no memfd_create")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            if seals & wanted != wanted:
                raise SegmentError("its size is not sealed")
            size = os.fstat(descriptor).st_size
            if size != header.byte_count:
                raise SegmentError(
                    f"it has {size} bytes, and should have {header.byte_count}"
                )
            mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise SegmentError(f"it is no sealed memory: {error}") from None
        finally:
            os.close(descriptor)
        data = memoryview(mapping)
        if not header.is_at_start_of(data):
            raise SegmentError(
                f"it is not the {header.kind.name.lower()} segment that was announced"
            )
        return cls(header, data)

    @property
    def descriptor(self) -> int:
        """To hand it over, of one that was made here."""
        assert self._descriptor is not None, "only its maker hands a segment over"
        return self._descriptor

    def close(self) -> None:
        """Gives the descriptor back. The memory goes with the last view of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()
