"""The coordinator daemon."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
import grpc_health.v1.health
import grpc_health.v1.health_pb2 as health_messages
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from psserver.config import CoordinatorConfig
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.host.history import CoordinatorHistory
from psserver.coordinator.host.restored_job import new_job_id, newest_saved
from psserver.coordinator.rpc.data_control import DataControl
from psserver.coordinator.rpc.public_control import PublicControl
from psserver.coordinator.rpc.shard_control import ShardControl
from psserver.coordinator.rpc.web_page import (
    action_routes,
    document_routes,
    page_routes,
)
from psserver.coordinator.rpc.worker_control import WorkerControl
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge.access import Access, watch_tokens
from psserver.edge.admin import AdminPort
from psserver.edge.descriptors import descriptors, fitted
from psserver.edge.ending import JobFailedError
from psserver.edge.lifecycle import (
    STOPPING_LINE,
    announce,
    bind,
    print_line,
    refuse_readiness,
    stay,
    stop,
    watch_certificates,
)
from psserver.edge.metrics import JOB, PROCESS, Process, metrics_route
from psserver.edge.open_calls import OpenCalls
from psserver.edge.probe import probe_handler
from psserver.edge.room import watch_room
from psserver.edge.server import ServerKind, make_server
from psserver.edge.state_folder import held_checkpoints, held_folder
from pswire.addresses import Address
from pswire.checkpoint.folder import CheckpointFolder
from pswire.keepalive import coordinator_keepalive
from pswire.logs import know
from pswire.metric_rows import Rows

SERVICE = "pswire.v1.CoordinatorService"

log = logging.getLogger("psserver.coordinator")


def coordinator_handler(host: CoordinatorHost) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            **ShardControl(host).methods(),
            **WorkerControl(host).methods(),
            **DataControl(host).methods(),
            **PublicControl(host).methods(),
        },
    )


async def run_coordinator(config: CoordinatorConfig) -> None:
    """Serves one job until told to stop, or until the job has failed.

    Raises:
        CheckpointError: The folder of checkpoints can't be written, or is another
            job's.
        ConfigurationError: The address can't be bound.
        CredentialsError: The files of TLS, or of tokens, can't be used.
        StateFolderError: The state folder can't be used.
        JobFailedError: The job can't go on.
    """
    config.validate()
    settings = config.job_settings(job_id=new_job_id(), job_seed=config.job_seed)
    url = settings.checkpoints.url if settings.checkpoints is not None else ""
    with (
        held_folder(config.state_dir),
        held_checkpoints(url),
        JobStore(config.state_dir) as store,
    ):
        access = Access.of(config.listen)
        folder = saved = None
        if url:
            folder = CheckpointFolder(url)
            # A job that has started goes on with its shards, if they live.
            saved = newest_saved(folder, url, verifies=not store.has_record)
        host = CoordinatorHost(settings, store, saved, config.limits)
        if folder is not None:
            host.checkpoints.claim(folder)
        host.history = CoordinatorHistory.open(config.history, host.core.settings)
        calls = OpenCalls(fitted(config.limits, descriptors()[1]), access)
        server = make_server(
            ServerKind.COORDINATOR,
            [coordinator_handler(host), probe_handler(access)],
            calls,
            coordinator_keepalive(config.lease_ttl_ms),
        )
        health = grpc_health.v1.health.aio.HealthServicer()
        add_HealthServicer_to_server(health, server)
        address = bind(server, config.listen)
        await server.start()
        for service in ("", SERVICE):
            await health.set(service, health_messages.HealthCheckResponse.SERVING)
        know(job=host.core.settings.job_id, clock=host.slowest_clock)
        _tell(config, host)
        try:
            async with _admin_port(config, host, calls, access, address) as admin:
                announce("coordinator", address)
                await stay(
                    host.run_clock(),
                    _fail_with(host),
                    watch_room(calls, address.port),
                    watch_certificates(config.listen),
                    watch_tokens(access),
                    drain=partial(_drain, host, health, admin),
                )
        finally:
            await health.enter_graceful_shutdown()
            await stop(server)
            host.history.close()


@asynccontextmanager
async def _admin_port(
    config: CoordinatorConfig,
    host: CoordinatorHost,
    calls: OpenCalls,
    access: Access | None,
    address: Address,
) -> AsyncIterator[AdminPort | None]:
    """Serves documents, metrics and the page of a job meanwhile, if it shall."""
    public = PublicControl(host)
    process = Process("coordinator", calls, access)
    if config.admin is None:
        yield None
        return
    async with AdminPort(
        config.admin,
        access,
        config.limits,
        unready_reason=lambda: host.unready_reason,
        routes=[
            *document_routes(public, address),
            metrics_route(Rows(PROCESS, lambda: process), Rows(JOB, public.readings)),
            *action_routes(host, has_tokens=config.listen.tokens is not None),
        ],
        open_routes=page_routes(),
    ) as admin:
        process.admin = admin
        host.admin_url = admin.url
        log.info("the page of this job is at %s", admin.url)
        yield admin


def _tell(config: CoordinatorConfig, host: CoordinatorHost) -> None:
    """Says what runs here, and what follows from the settings without being said."""
    settings = host.core.settings
    log.info(
        "job %s: %d shard%s, at least %d worker%s, %s, lease %g s",
        settings.job_id,
        settings.shard_count,
        "s" if settings.shard_count > 1 else "",
        settings.workers_min,
        "s" if settings.workers_min > 1 else "",
        settings.terms,
        settings.lease_ttl_ms / 1000,
    )
    for note in config.notes():
        log.warning("%s", note)
    before = host.core.record or host.core.progress.start_point
    if before is not None and before.terms != settings.terms:
        log.warning(
            "the job goes on in %s, as before; --mode and what goes with it are for a "
            "new job, `psctl mode` changes a running one",
            before.terms,
        )


async def _drain(
    host: CoordinatorHost,
    health: grpc_health.v1.health.aio.HealthServicer,
    admin: AdminPort | None,
) -> None:
    host.is_ending = True
    await refuse_readiness(health, admin)
    if host.core.settings.checkpoints is not None:
        await host.checkpoints.save_last()
        print_line(STOPPING_LINE)


async def _fail_with(host: CoordinatorHost) -> None:
    reason = await host.until_failed()
    if host.is_ending:  # its shards end, too: nobody needs to do anything
        await asyncio.Event().wait()
    cure = "start a new job, with another --state-dir"
    if host.core.way_back is not None:
        cure = (
            "start all again by the same command lines, and the job goes on from "
            f"{host.core.way_back.point}"
        )
    elif host.core.settings.checkpoints is None:
        cure += ". With --checkpoint-dir a job goes on from its newest checkpoint"
    raise JobFailedError(f"{reason}; {cure}")
