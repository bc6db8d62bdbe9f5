"""A link between two network namespaces that takes its time."""

import asyncio
import contextlib
import fcntl
import os
import struct
import subprocess
import threading
from typing import Final, Self

TUN: Final = "/dev/net/tun"
PACKET_BYTES_MAX: Final = 1 << 16

# Of linux/if_tun.h.
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000


class LinkEnd:
    """A device whose packets this process reads and writes."""

    def __init__(self) -> None:
        """Makes it where this process is.

        Raises:
            OSError: This user may not, or the kernel has no such devices.
        """
        self.descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        try:
            wanted = struct.pack("16sH22x", b"hosts%d", _IFF_TUN | _IFF_NO_PI)
            made = fcntl.ioctl(self.descriptor, _TUNSETIFF, wanted)
        except OSError:
            os.close(self.descriptor)
            raise
        self.name = made[:16].rstrip(b"\0").decode()

    def move(self, process_id: int) -> None:
        """Moves it to the namespace of a process."""
        command = ["ip", "link", "set", self.name, "netns", str(process_id)]
        subprocess.run(command, check=True, capture_output=True, text=True)


class DelayedLink:
    """Passes packets on, each after the same time. A context manager.

    By TUN devices, as many kernels come without netem.

    Attributes:
        ends: Two devices.
    """

    def __init__(self, delay_s: float) -> None:
        """Makes the devices, and passes nothing on yet."""
        self._delay_s = delay_s
        with contextlib.ExitStack() as made:
            first = LinkEnd()
            made.callback(os.close, first.descriptor)
            self.ends = (first, LinkEnd())
            made.pop_all()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link")

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        """Passes packets on from now on. Both devices must be up."""
        first, second = (end.descriptor for end in self.ends)
        self._loop.add_reader(first, self._pass_on, first, second)
        self._loop.add_reader(second, self._pass_on, second, first)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self._thread.ident is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        for end in self.ends:
            os.close(end.descriptor)

    def _pass_on(self, here: int, there: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(here, PACKET_BYTES_MAX)
                self._loop.call_later(self._delay_s, os.write, there, packet)
