"""A whole job in this process: the real coordinator and shards on a thread.

Starts in a fraction of the daemons' time, and lets a test break calls of the data
plane at a point of its choice. Only tests put both sides into one process.
"""

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from psserver.core.job_settings import JobSettings
from psserver.core.record import Record
from psserver.host.coordinator_host import CoordinatorHost, new_job_id
from psserver.host.shard_host import ShardHost
from psserver.rpc.coordinator_client import CoordinatorClient
from psserver.rpc.coordinator_service import CoordinatorService
from psserver.rpc.late_handler import LateHandler
from psserver.rpc.parameter_service import ParameterService
from psserver.rpc.server import ServerKind, make_server
from psserver.storage.job_store import JobStore
from pswire.channels import ChannelKind, aio_channel

Requests = AsyncIterator[bytes]
Responses = AsyncIterator[bytes]
Context = grpc.aio.ServicerContext[bytes, bytes]
Stream = Callable[[Requests, Context], Responses]
Fault = Callable[[Stream], Stream]


class BreakableHandler(grpc.GenericRpcHandler):
    """Passes calls on; `PushPull` calls break as the next armed fault says."""

    def __init__(self, inner: grpc.GenericRpcHandler) -> None:
        self._inner = inner
        self.faults: deque[Fault] = deque()
        self.push_count = 0

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method = self._inner.service(handler_call_details)
        name = handler_call_details.method
        if method is None or not str(name).endswith("/PushPull"):
            return method
        self.push_count += 1
        if not self.faults:
            return method
        stream: Any = method.stream_stream
        return grpc.stream_stream_rpc_method_handler(self.faults.popleft()(stream))


def lose_reply(inner: Stream) -> Stream:
    """The push is done, and nothing of the answer arrives."""

    async def stream(requests: Requests, context: Context) -> Responses:
        async for _ in inner(requests, context):
            pass
        yield await context.abort(grpc.StatusCode.UNAVAILABLE, "lost by the test")

    return stream


def cut_upload(message_count: int) -> Fault:
    """The call breaks after some messages, not the last, have been taken."""

    def fault(inner: Stream) -> Stream:
        async def stream(requests: Requests, context: Context) -> Responses:
            taken = asyncio.Event()

            async def first() -> AsyncIterator[bytes]:
                count = 0
                async for request in requests:
                    yield request
                    count += 1
                    if count == message_count:
                        taken.set()
                        await asyncio.Event().wait()

            async def drain() -> None:
                async for _ in inner(first(), context):
                    pass

            draining = asyncio.ensure_future(drain())
            await taken.wait()
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            yield await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")

        return stream

    return fault


class LocalJob:
    """A coordinator and shards on loopback.

    Attributes:
        address: Where the coordinator listens.
        shards: Each shard's calls, to be broken.
        shard_addresses: Where each shard listens.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        shard_count: int = 2,
        workers_min: int = 1,
        lease_ttl_ms: int = 10_000,
        port: int = 0,
    ) -> None:
        self._settings = JobSettings(
            job_id=new_job_id(),
            shard_count=shard_count,
            workers_min=workers_min,
            lease_ttl_ms=lease_ttl_ms,
            job_seed=7,
        )
        self._state_dir = state_dir
        self._port = port
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="local-job")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._host: CoordinatorHost | None = None
        self._stop_shard: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self.address = ""
        self.shards: list[BreakableHandler] = []
        self.shard_addresses: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    @property
    def record(self) -> Record | None:
        """Newest record of the coordinator."""
        assert self._host is not None
        return self._host.core.record

    def wait_record(self, is_wanted: Callable[[Record], bool]) -> Record:
        """Returns the first record from now on that is as wanted."""
        assert self._host is not None
        assert self._loop is not None
        host = self._host

        async def wait() -> Record:
            while host.core.record is None or not is_wanted(host.core.record):
                await host.changes.wait_until(
                    lambda: (
                        host.core.record is not None and is_wanted(host.core.record)
                    ),
                    1.0,
                )
            return host.core.record

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(30)

    def stop_shard(self, shard_index: int) -> None:
        """Ends a shard as its death would: its server and its watch."""
        assert self._loop is not None
        stop = self._stop_shard[shard_index]()
        asyncio.run_coroutine_threadsafe(stop, self._loop).result(30)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with AsyncExitStack() as stack:
            with JobStore(self._state_dir) as store:
                self._host = host = CoordinatorHost(self._settings, store)
                coordinator = make_server(
                    ServerKind.COORDINATOR, [CoordinatorService(host).handler()]
                )
                self.address = await _listen(coordinator, self._port)
                clock = asyncio.ensure_future(host.run_clock())
                for _ in range(self._settings.shard_count):
                    await self._start_shard(stack)
                self._ready.set()
                await self._stop.wait()
                clock.cancel()
                await asyncio.gather(clock, return_exceptions=True)
                await stack.aclose()
                await coordinator.stop(0)

    async def _start_shard(self, stack: AsyncExitStack) -> None:
        late = LateHandler()
        server = make_server(ServerKind.SHARD, [late])
        address = await _listen(server)
        self.shard_addresses.append(address)
        channel = aio_channel(self.address, ChannelKind.CONTROL)
        client = CoordinatorClient(channel, self.address)
        place = await client.register(process_id=uuid.uuid4().hex, address=address)
        host = ShardHost(
            shard_index=place.shard_index,
            incarnation=place.incarnation,
            job_id=place.settings.job_id,
            shard_count=place.settings.shard_count,
            thread_count=2,
        )
        handler = BreakableHandler(ParameterService(host).handler())
        self.shards.append(handler)
        late.set(handler)

        duty = asyncio.ensure_future(client.serve(host))

        async def stop() -> None:
            duty.cancel()
            await asyncio.gather(duty, return_exceptions=True)
            await channel.close()
            host.close()
            await server.stop(0)

        self._stop_shard.append(stop)
        stack.push_async_callback(stop)


async def _listen(server: grpc.aio.Server, wanted_port: int = 0) -> str:
    port = server.add_insecure_port(f"127.0.0.1:{wanted_port}")
    await server.start()
    return f"127.0.0.1:{port}"
