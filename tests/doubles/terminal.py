"""A command in a terminal, and what a person sees there."""

import codecs
import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable

import pyte

WAIT_TIMEOUT_S = 60.0
WIDTH, HEIGHT = 80, 24


class Terminal:
    """A terminal of 80 columns and 24 rows, and the command that it runs."""

    def __init__(self, *command: str, environment: dict[str, str]) -> None:
        self._master, slave = os.openpty()
        os.set_blocking(self._master, False)
        size = struct.pack("HHHH", HEIGHT, WIDTH, 0, 0)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
        self.modes_before = termios.tcgetattr(slave)
        self._slave = slave
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        self.screen = pyte.Screen(WIDTH, HEIGHT)
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.raw = b""

    @property
    def modes(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def until(self, is_so: Callable[[str], bool]) -> str:
        """What is on the screen once it is as wanted."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not is_so(text := "\n".join(self.screen.display)):
            assert time.monotonic() < deadline, text
            if select.select([self._master], [], [], 0.1)[0]:
                data = os.read(self._master, 65536)
                self.raw += data
                self._stream.feed(self._decoder.decode(data))
        return text

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)
