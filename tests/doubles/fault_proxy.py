"""A TCP proxy that a test makes slow, deaf, mute or brutal.

It stands between any two processes and passes bytes through unchanged until it is told
otherwise. A direction is `UP` for bytes to the target and `DOWN` for those from it.
Faults hold for connections that are there and for those that come, until `heal`.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")

BUFFER_BYTES: Final = 1 << 16
PIECES_UNDER_WAY: Final = 64
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
TIMEOUT_S: Final = 30.0
"""Longest time for an order to the proxy."""


class Direction(Enum):
    """Which way bytes go."""

    UP = "up"
    DOWN = "down"


UP: Final = Direction.UP
DOWN: Final = Direction.DOWN
BOTH: Final = (UP, DOWN)


@dataclass(slots=True)
class _Way:
    """What happens to bytes in one direction.

    Attributes:
        delay_s: How late each piece arrives.
        bytes_per_s: How fast it may go at most, 0 for no limit.
        is_black_hole: Whether bytes are taken and never arrive.
        left_bytes: How many go on until their connection is cut, None for all.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    is_black_hole: bool = False
    left_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes under way, or without any the end of a direction."""

    data: bytes
    due: float
    is_broken: bool = False


class _Link:
    """One connection: the near side, the far side, and which directions have ended."""

    def __init__(
        self,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.sources = {UP: near[0], DOWN: far[0]}
        self.sinks = {UP: far[1], DOWN: near[1]}
        self.ended: set[Direction] = set()

    def reset(self) -> None:
        """Ends both sides with a RST: what was under way is lost."""
        for sink in self.sinks.values():
            held = sink.get_extra_info("socket")
            if held is not None and held.fileno() >= 0:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            sink.transport.abort()

    def close(self) -> None:
        """Ends both sides in order: what was passed on arrives."""
        for sink in self.sinks.values():
            sink.close()

    def end(self, way: Direction) -> None:
        """Ends one direction in order; what comes for it later goes nowhere."""
        if way not in self.ended:
            self.ended.add(way)
            sink = self.sinks[way]
            if sink.can_write_eof() and not sink.transport.is_closing():
                # Its peer may have ended both directions a moment ago.
                with contextlib.suppress(OSError):
                    sink.write_eof()


class FaultProxy:
    """Passes bytes between its own port and another. A context manager.

    Every method may be called from any thread.

    Attributes:
        address: Where it listens.
        connection_count: Connections that were passed on so far.
        cut_count: Cuts that `cut_after` has brought about.
        passed_bytes: Bytes that have gone on so far, by direction.
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host.strip("[]"), int(port))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ways = {UP: _Way(), DOWN: _Way()}
        self._changed = asyncio.Event()
        self._refuses = False
        self.address = ""
        self.connection_count = 0
        self.cut_count = 0
        self.passed_bytes = {UP: 0, DOWN: 0}

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Faults

    def slow(
        self,
        *,
        delay_s: float = 0.0,
        bytes_per_s: float = 0.0,
        ways: Iterable[Direction] = BOTH,
    ) -> None:
        """Delays every piece, and lets no more bytes through a second than this."""

        def change(way: _Way) -> None:
            way.delay_s, way.bytes_per_s = delay_s, bytes_per_s

        self._change(ways, change)

    def black_hole(self, ways: Iterable[Direction] = BOTH) -> None:
        """Takes bytes and lets none arrive; connections stay open."""

        def change(way: _Way) -> None:
            way.is_black_hole = True

        self._change(ways, change)

    def cut_after(self, byte_count: int, way: Direction) -> None:
        """Ends the connection that passes the last of so many bytes, once.

        What came before the cut arrives; what is under way the other way is lost. The
        bytes count from now on, over all connections.
        """

        def change(each: _Way) -> None:
            each.left_bytes = byte_count

        self._change((way,), change)

    def reset(self) -> None:
        """Ends every connection as a RST does; new ones are welcome."""

        def reset() -> None:
            for link in list(self._links):
                link.reset()

        self._order(reset)

    def half_close(self, way: Direction) -> None:
        """Ends one direction of every connection that is there, in order."""

        def close() -> None:
            for link in list(self._links):
                link.end(way)

        self._order(close)

    def refuse(self) -> None:
        """Ends every connection, and each new one at once."""

        def refuse() -> None:
            self._refuses = True
            for link in list(self._links):
                link.reset()

        self._order(refuse)

    def heal(self) -> None:
        """Ends all faults. What a black hole has swallowed is gone, so connections
        that lost bytes are reset: TCP would not let them go on without.
        """

        def heal() -> None:
            had_hole = any(way.is_black_hole for way in self._ways.values())
            self._ways = {UP: _Way(), DOWN: _Way()}
            self._refuses = False
            for link in list(self._links) if had_hole else ():
                link.reset()
            self._wake()

        self._order(heal)

    @property
    def open_count(self) -> int:
        """Connections that are open now."""
        return self._order(lambda: len(self._links))

    # Inside

    def _change(self, ways: Iterable[Direction], act: Callable[[_Way], None]) -> None:
        def change() -> None:
            for way in ways:
                act(self._ways[way])
            self._wake()

        self._order(change)

    def _order(self, act: Callable[[], T]) -> T:
        async def run() -> T:
            return act()

        return self._run(run())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, limit=BUFFER_BYTES
        )
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for link in list(self._links):
            link.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            far = await asyncio.open_connection(*self._target, limit=BUFFER_BYTES)
        except OSError:  # nobody is there any more
            writer.transport.abort()
            return
        link = _Link((reader, writer), far)
        if self._refuses:  # since a moment ago
            link.reset()
            return
        self.connection_count += 1
        self._links.add(link)
        task = asyncio.ensure_future(self._carry(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, link: _Link) -> None:
        """Passes both directions on until both have ended, or one was cut."""
        passing = [asyncio.ensure_future(self._pass(link, way)) for way in BOTH]
        try:
            await asyncio.gather(*passing)
        finally:
            for each in passing:
                each.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
            self._links.discard(link)
            link.close()

    async def _pass(self, link: _Link, direction: Direction) -> None:
        """Reads one direction, and delivers it when each piece is due."""
        pieces: asyncio.Queue[_Piece] = asyncio.Queue(PIECES_UNDER_WAY)
        reading = asyncio.ensure_future(self._read(link, direction, pieces))
        try:
            await self._deliver(link, direction, pieces)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(
        self, link: _Link, direction: Direction, pieces: "asyncio.Queue[_Piece]"
    ) -> None:
        due, is_broken, data = 0.0, False, b"-"
        while data:
            try:
                data = await link.sources[direction].read(BUFFER_BYTES)
            except ConnectionError:
                data, is_broken = b"", True
            due = self._due(direction, due, len(data))
            await pieces.put(_Piece(data, due, is_broken=is_broken))

    async def _deliver(
        self, link: _Link, direction: Direction, pieces: "asyncio.Queue[_Piece]"
    ) -> None:
        sink = link.sinks[direction]
        while True:
            piece = await pieces.get()
            await self._wait_due(piece.due)
            if not piece.data:
                # Not even the end of a connection comes out of a black hole.
                while self._ways[direction].is_black_hole:
                    await self._changed.wait()
                link.reset() if piece.is_broken else link.end(direction)
                return
            data, is_cut = self._admitted(direction, piece.data)
            if data and direction not in link.ended:
                try:
                    sink.write(data)
                    await sink.drain()
                except ConnectionError:
                    link.reset()
                    return
                self.passed_bytes[direction] += len(data)
            if is_cut:
                self.cut_count += 1
                link.close()
                return

    def _admitted(self, direction: Direction, data: bytes) -> tuple[bytes, bool]:
        """What of some bytes goes on, and whether their connection ends behind it."""
        way = self._ways[direction]
        if way.is_black_hole:
            return b"", False
        if way.left_bytes is None:
            return data, False
        admitted = data[: way.left_bytes]
        if way.left_bytes <= len(data):
            way.left_bytes = None
            return admitted, True
        way.left_bytes -= len(data)
        return admitted, False

    def _due(self, direction: Direction, before: float, byte_count: int) -> float:
        """When bytes that came just now have gone through a link of this speed."""
        way = self._ways[direction]
        if not way.delay_s and not way.bytes_per_s:
            return before if before > self._loop.time() else 0.0
        sent = max(before - way.delay_s, self._loop.time())
        if way.bytes_per_s:
            sent += byte_count / way.bytes_per_s
        return sent + way.delay_s

    async def _wait_due(self, due: float) -> None:
        """Waits for a time; when the faults change, what is under way comes at once."""
        left_s = due - self._loop.time()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
