"""The coordinator daemon."""

import logging
import secrets

import grpc_health.v1.health
import grpc_health.v1.health_pb2 as health_messages
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from psserver.config import CoordinatorConfig
from psserver.core.job_settings import JobSettings
from psserver.daemon.job_failed import JobFailedError
from psserver.daemon.lifecycle import DRAIN_TIMEOUT_S, announce, bind, stay
from psserver.host.coordinator_host import CoordinatorHost
from psserver.host.restored_job import new_job_id
from psserver.rpc.coordinator_service import SERVICE, CoordinatorService
from psserver.rpc.server import ServerKind, make_server
from psserver.storage.job_store import JobStore
from psserver.storage.state_folder import held_folder

log = logging.getLogger("psserver.coordinator")


async def run_coordinator(config: CoordinatorConfig) -> None:
    """Serves one job until told to stop, or until the job has failed.

    Raises:
        ConfigurationError: The address can't be bound.
        StateFolderError: The state folder can't be used.
        JobFailedError: The job can't go on.
    """
    config.validate()
    with held_folder(config.state_dir), JobStore(config.state_dir) as store:
        settings = JobSettings(
            job_id=new_job_id(),
            shard_count=config.shard_count,
            workers_min=config.workers_min,
            lease_ttl_ms=config.lease_ttl_ms,
            job_seed=config.job_seed or secrets.randbits(62),
        )
        host = CoordinatorHost(settings, store)
        server = make_server(
            ServerKind.COORDINATOR, [CoordinatorService(host).handler()]
        )
        health = grpc_health.v1.health.aio.HealthServicer()
        add_HealthServicer_to_server(health, server)
        address = bind(server, config.listen)
        await server.start()
        for service in ("", SERVICE):
            await health.set(service, health_messages.HealthCheckResponse.SERVING)
        log.info(
            "job %s: %d shards, at least %d workers, BSP",
            host.core.settings.job_id,
            config.shard_count,
            config.workers_min,
        )
        announce("coordinator", address)
        try:
            await stay(host.run_clock(), _fail_with(host))
        finally:
            await health.enter_graceful_shutdown()
            await server.stop(DRAIN_TIMEOUT_S)


async def _fail_with(host: CoordinatorHost) -> None:
    reason = await host.until_failed()
    raise JobFailedError(f"{reason}; start a new job, with another --state-dir")
