"""A TCP proxy whose connections a test can cut."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class CuttableProxy:
    """Passes bytes between its own port and another.

    Attributes:
        address: Where it listens.
        connection_count: Connections so far.
        cut_count: Cuts that `cut_after` has brought about.
    """

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._refuses = False
        self._left_bytes: dict[bool, int] = {}
        self.connection_count = 0
        self.cut_count = 0
        self.address = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self, *, for_good: bool = False) -> None:
        """Ends all connections, and with `for_good` every new one at once."""

        async def cut() -> None:
            self._refuses = for_good
            for writer in list(self._writers):
                writer.transport.abort()

        self._run(cut())

    def mend(self) -> None:
        """Takes connections again."""

        async def mend() -> None:
            self._refuses = False

        self._run(mend())

    def cut_after(self, byte_count: int, *, is_upwards: bool) -> None:
        """Ends the connection that passes the last of so many bytes, once.

        Args:
            byte_count: Bytes from now on, of all connections together.
            is_upwards: Whether those to the target count, or those from it.
        """

        async def arm() -> None:
            self._left_bytes[is_upwards] = byte_count

        self._run(arm())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        self.connection_count += 1
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(
                self._host, self._port
            )
        except OSError:  # nobody is there any more
            self._writers.discard(writer)
            writer.transport.abort()
            return
        pairs = ((reader, far_writer), (far_reader, writer))
        for source, sink in pairs:
            passing = self._pass(source, sink, is_upwards=sink is far_writer)
            self._tasks.add(asyncio.ensure_future(passing))

    async def _pass(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        *,
        is_upwards: bool,
    ) -> None:
        self._writers.add(sink)
        try:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    left = self._left_bytes.get(is_upwards, len(data) + 1)
                    sink.write(data[:left])
                    await sink.drain()
                    if left <= len(data):
                        # Closed in order on the far side, so that what came before
                        # the cut arrives; the near side sees its connection end.
                        del self._left_bytes[is_upwards]
                        self.cut_count += 1
                        return
                    if is_upwards in self._left_bytes:
                        self._left_bytes[is_upwards] = left - len(data)
        finally:
            self._writers.discard(sink)
            sink.close()
