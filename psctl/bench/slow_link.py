"""A TCP link of limited speed, for machines that have only loopback.

Bytes of each direction pass in order, each delayed, and no more of them in a second
than the link carries. Run as a process of its own.
"""

import asyncio
import sys
from typing import Final

_PIECE_BYTES: Final = 256 << 10
_PIECES_UNDER_WAY: Final = 64


async def serve(
    port: int, target_port: int, bytes_per_s: float, delay_s: float
) -> None:
    """Passes connections to a port of loopback on to another one, for ever.

    Each piece is under way for `delay_s`, beside its own length.
    """

    async def accept(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection(
            "127.0.0.1", target_port, limit=_PIECE_BYTES
        )
        ways = (reader, far_writer), (far_reader, writer)
        await asyncio.gather(
            *(_pass(*way, bytes_per_s, delay_s) for way in ways),
            return_exceptions=True,
        )
        for end in (writer, far_writer):
            end.close()

    server = await asyncio.start_server(accept, "127.0.0.1", port, limit=_PIECE_BYTES)
    print(f"passes 127.0.0.1:{port} on to port {target_port}", flush=True)
    await server.serve_forever()


async def _pass(
    source: asyncio.StreamReader,
    sink: asyncio.StreamWriter,
    bytes_per_s: float,
    delay_s: float,
) -> None:
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES_UNDER_WAY)

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                sink.write_eof()
                return
            sink.write(data)
            await sink.drain()

    delivering = asyncio.ensure_future(deliver())
    free_at = loop.time()
    data = b"-"
    while data:
        data = await source.read(_PIECE_BYTES)
        free_at = max(free_at, loop.time()) + len(data) / bytes_per_s
        await under_way.put((free_at + delay_s, data))
    await delivering


if __name__ == "__main__":
    own, target, speed, delay = sys.argv[1:]
    asyncio.run(serve(int(own), int(target), float(speed), float(delay)))
