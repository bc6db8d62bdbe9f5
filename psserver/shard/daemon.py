"""The shard daemon."""

import asyncio
import gc
import logging
import sys
import uuid
from contextlib import nullcontext
from functools import partial
from typing import Any

import grpc
import grpc_health.v1.health
import grpc_health.v1.health_pb2 as health_messages
import torch
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from psserver.config import ShardConfig
from psserver.edge.access import Access, watch_tokens
from psserver.edge.admin import AdminPort
from psserver.edge.descriptors import descriptors, fitted
from psserver.edge.ending import JobFailedError
from psserver.edge.file_calls import in_thread
from psserver.edge.lifecycle import (
    announce,
    bind,
    refuse_readiness,
    stay,
    stop,
    watch_certificates,
)
from psserver.edge.metrics import (
    PROCESS,
    SHARD,
    Process,
    ShardReadings,
    metrics_route,
)
from psserver.edge.open_calls import OpenCalls
from psserver.edge.probe import probe_handler
from psserver.edge.room import watch_room
from psserver.edge.server import ServerKind, make_server
from psserver.edge.state_folder import held_folder
from psserver.edge.usable_memory import usable_memory
from psserver.shard.host.history import ShardHistory
from psserver.shard.host.recorder import Recorder
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.host.shared_segments import listening
from psserver.shard.rpc.coordinator_client import CoordinatorClient
from psserver.shard.rpc.parameter_service import SERVICE, ParameterService
from psserver.shard.tensors.shard_vectors import ValuesSegment
from psserver.shard.tensors.supported_optimizers import load_optimizers
from pswire.channels import ChannelKind, aio_channel
from pswire.logs import know
from pswire.membership_codec import read_settings
from pswire.metric_rows import Rows
from pswire.process_memory import keep_freed_memory
from pswire.reasons import ErrorReason, Refusal
from pswire.shared_memory.segments import boot_id


class LateHandler(grpc.GenericRpcHandler):
    """Passes calls on to a handler that is set later."""

    def __init__(self) -> None:
        self._inner: grpc.GenericRpcHandler | None = None

    def set(self, inner: grpc.GenericRpcHandler) -> None:
        """From now on calls are served."""
        self._inner = inner

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The method's handler, None for an unknown method."""
        if self._inner is None:
            return None
        return self._inner.service(handler_call_details)


class _Place:
    """What this process is in the job.

    Attributes:
        host: The shard, None before it has a place.
        client: Reports to the coordinator; None before it does.
    """

    def __init__(self) -> None:
        self.host: ShardHost | None = None
        self.client: CoordinatorClient | None = None

    @property
    def unready_reason(self) -> str:
        """Why it serves nobody now, in words; empty while it does."""
        if self.host is None:
            return "the coordinator has given it no place in the job yet"
        return self.host.unready_reason

    @property
    def readings(self) -> ShardReadings | None:
        """What monitoring gets, None before it knows its model and after the end."""
        host, client = self.host, self.client
        if host is None or client is None or client.progress is None:
            return None
        is_there = host.has_model and not host.end_reason
        return client.progress.readings() if is_there else None


SWITCH_INTERVAL_S = 5e-4

log = logging.getLogger("psserver.shard")


async def run_shard(config: ShardConfig) -> None:
    """Serves one shard until it is stopped, or until the job has failed.

    Raises:
        ConfigurationError: The address can't be bound.
        CredentialsError: The files of TLS, or of tokens, can't be used.
        StateFolderError: The state folder can't be used.
        Refusal: The coordinator does not want this shard.
        JobFailedError: The job can't go on.
    """
    config.validate()
    # Chunks are the unit of parallelism; torch's own threads would compete with them.
    torch.set_num_threads(1)
    # The event loop and the apply threads trade the interpreter's lock; at the
    # default of 5 ms one apply beside a busy thread took 31 ms instead of 2.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    late = LateHandler()
    access = Access.of(config.listen)
    calls = OpenCalls(fitted(config.limits, descriptors()[1]), access)
    probe = probe_handler(access, shares_memory=config.shares_memory)
    server = make_server(ServerKind.SHARD, [late, probe], calls)
    health = grpc_health.v1.health.aio.HealthServicer()
    add_HealthServicer_to_server(health, server)
    with held_folder(config.state_dir):
        address = bind(server, config.listen)
        await server.start()
        await health.set(SERVICE, health_messages.HealthCheckResponse.NOT_SERVING)
        if text := config.unreachable_text:
            log.warning("%s", text)
        place = _Place()
        process = Process("shard", calls, access)
        try:
            async with (
                nullcontext()
                if config.admin is None
                else AdminPort(
                    config.admin,
                    access,
                    config.limits,
                    unready_reason=lambda: place.unready_reason,
                    routes=[
                        metrics_route(
                            Rows(PROCESS, lambda: process),
                            Rows(SHARD, lambda: place.readings),
                        )
                    ],
                )
            ) as admin:
                process.admin = admin
                if admin is not None:
                    log.info("health and metrics of this shard are at %s", admin.url)

                async def drain() -> None:
                    await refuse_readiness(health, admin)
                    if place.host is not None and place.client is not None:
                        await place.client.drain(place.host)

                announce("shard", address)
                await stay(
                    _serve(
                        config, str(config.advertise or address), place, late, health
                    ),
                    watch_room(calls, address.port),
                    watch_certificates(config.listen),
                    watch_tokens(access),
                    _import_optimizers(),
                    drain=drain,
                )
        finally:
            await health.enter_graceful_shutdown()
            await stop(server)


async def _import_optimizers() -> None:
    """Imports what the first update needs, before a worker waits for it.

    It takes 1.4 s, in which a shard that replaces a lost one has its place already and
    reads its values.
    """
    # By a thread that the end of the process does not wait for.
    await in_thread(load_optimizers)
    # What modules are made of stays: a look through all of it for garbage takes tens of
    # milliseconds, and holds up a step.
    gc.freeze()
    await asyncio.Event().wait()  # as long as the shard serves


async def _serve(
    config: ShardConfig,
    address: str,
    place: _Place,
    late: LateHandler,
    health: grpc_health.v1.health.aio.HealthServicer,
) -> None:
    """Registers under an address, then serves until the job ends.

    As a new start, with nothing, when the job returns to a checkpoint.
    """
    async with aio_channel(
        str(config.coordinator), ChannelKind.CONTROL, config.listen.credentials
    ) as channel:
        client = CoordinatorClient(channel, str(config.coordinator))
        index = config.index
        while True:
            given = await client.register(
                process_id=uuid.uuid4().hex,
                address=address,
                memory=usable_memory(),
                wanted_index=index,
            )
            index = given.shard_index
            log.info("shard %d of job %s", given.shard_index, given.settings.job_id)
            host = ShardHost(
                shard_index=given.shard_index,
                incarnation=given.incarnation,
                settings=read_settings(given.settings),
                thread_count=config.thread_count,
                shares_memory=config.shares_memory and bool(boot_id()),
                limits=config.limits,
            )
            host.history = ShardHistory.open(
                config.history,
                shard_index=host.shard_index,
                incarnation=host.incarnation,
                settings=host.settings,
            )
            if config.record is not None:
                host.recorder = Recorder.open(
                    config.record,
                    shard_index=host.shard_index,
                    incarnation=host.incarnation,
                    settings=host.settings,
                    gib_max=config.record_gib_max,
                )
            place.host, place.client = host, client
            know(job=host.settings.job_id, id=index, clock=host.slowest_clock)
            late.set(ParameterService(host).handler())
            await health.set(SERVICE, health_messages.HealthCheckResponse.SERVING)
            try:
                with listening(host.shared, partial(_shared_values, host)):
                    try:
                        await client.serve(host)
                    finally:
                        host.close()
                raise JobFailedError(host.end_reason)
            except Refusal as refusal:
                if refusal.reason is not ErrorReason.SHARD_INCARNATION_STALE:
                    raise
                log.warning(
                    "shard %d gives up its values and asks for a place again, since "
                    "the job returns to a checkpoint: %s",
                    *(host.shard_index, refusal.message),
                )
            place.host = client.progress = None
            await health.set(SERVICE, health_messages.HealthCheckResponse.NOT_SERVING)


def _shared_values(host: ShardHost) -> ValuesSegment | None:
    return host.model.engine.vectors.shared if host.has_model else None
