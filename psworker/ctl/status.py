"""`psctl status`: where a job stands, for people and for programs.

The JSON keeps its names within a `schema_version`; new ones may be added.
`docs/psctl.md` describes it.
"""

import asyncio
from typing import Final

from pswire.addresses import Address
from pswire.reasons import Refusal
from psworker.ctl.tables import aligned, byte_text, printable
from psworker.errors import error_of_refusal
from psworker.reachability import problem_behind_call, unreachable, wait_reachable
from psworker.transport.call_error import CallError
from psworker.transport.status_client import JobStatus, WorkerState, fetch_status

SCHEMA_VERSION: Final = 1

CONNECT_TIMEOUT_S: Final = 2.0
"""Longest wait for something to listen there. A person looks now, not later."""

TIMEOUT_S: Final = 5.0
"""Longest wait for the coordinator's answer."""


def read_status(coordinator: Address) -> JobStatus:
    """Asks the coordinator.

    Raises:
        ConnectError: It can't be reached; the text says why.
        PsError: It refused.
    """
    wait_reachable(coordinator, CONNECT_TIMEOUT_S)
    try:
        return asyncio.run(fetch_status(str(coordinator), timeout_s=TIMEOUT_S))
    except CallError as error:
        if error.refusal is not None:
            raise error.to_ps_error() from error
        problem = problem_behind_call(coordinator, error.code, error.text)
        raise unreachable(coordinator, TIMEOUT_S, problem) from error
    except Refusal as refusal:
        raise error_of_refusal(refusal) from refusal


def lag_of(worker: WorkerState, status: JobStatus) -> int:
    """Clocks the worker is behind the one that is ahead."""
    return max(each.clock for each in status.workers) - worker.clock


def status_json(coordinator: Address, status: JobStatus) -> dict[str, object]:
    """The status for programs. Unknown is `null`, never a magic number."""
    settings = status.settings
    return {
        "schema_version": SCHEMA_VERSION,
        "coordinator": str(coordinator),
        "job": {
            "job_id": settings.job_id,
            "mode": settings.mode.value,
            "staleness_bound": settings.staleness_bound,
            "shard_count": settings.shard_count,
            "workers_min": settings.workers_min,
            "lease_ttl_ms": settings.lease_ttl_ms,
        },
        "phase": status.phase,
        "generation": status.generation,
        "waiting_for": status.waiting_for or None,
        "failure": status.failure or None,
        "snapshot_version": _known(status.snapshot_version),
        "tensor_count": status.tensor_count,
        "parameter_bytes": status.parameter_bytes,
        "workers": [
            {
                "worker_id": worker.worker_id,
                "incarnation": worker.incarnation,
                "rank": _known(worker.rank),
                "state": worker.state,
                "clock": worker.clock,
                "lag": lag_of(worker, status),
                "silent_ms": _known(worker.silent_ms),
                "address": worker.address or None,
            }
            for worker in status.workers
        ],
        "shards": [
            {
                "shard_index": shard.shard_index,
                "incarnation": shard.incarnation,
                "state": shard.state,
                "address": shard.address or None,
                "silent_ms": _known(shard.silent_ms),
                "parameter_bytes": shard.parameter_bytes,
                "optimizer_bytes": shard.optimizer_bytes,
                "clock": shard.clock,
                "version": shard.version,
            }
            for shard in status.shards
        ],
    }


def status_text(status: JobStatus) -> str:
    """The status for people."""
    settings = status.settings
    mode = settings.mode.value
    if mode == "ssp":
        mode += f" (staleness {settings.staleness_bound})"
    facts = [
        f"job         {printable(settings.job_id)}",
        f"mode        {mode}",
        f"phase       {status.phase}, generation {status.generation}",
        f"model       {status.tensor_count} tensors, "
        f"{byte_text(status.parameter_bytes)}",
        f"snapshot    {_version_text(status.snapshot_version)}",
        f"waits for   {printable(status.waiting_for) or 'nobody'}",
    ]
    if status.failure:
        facts.append(f"failure     {printable(status.failure)}")
    shards = aligned(
        ("SHARD", "STATE", "CLOCK", "VERSION", "SILENT", "PARAMETERS", "ADDRESS"),
        [
            (
                shard.shard_index,
                shard.state,
                shard.clock,
                shard.version,
                _silence_text(shard.silent_ms),
                byte_text(shard.parameter_bytes),
                shard.address or "-",
            )
            for shard in status.shards
        ],
    )
    workers = aligned(
        ("WORKER", "RANK", "STATE", "CLOCK", "LAG", "SILENT", "ADDRESS"),
        [
            (
                worker.worker_id,
                "-" if worker.rank < 0 else str(worker.rank),
                worker.state,
                worker.clock,
                lag_of(worker, status),
                _silence_text(worker.silent_ms),
                worker.address or "-",
            )
            for worker in status.workers
        ],
    )
    return "\n".join(
        [*facts, "", shards, "", workers if status.workers else "no workers"]
    )


def _known(number: int) -> int | None:
    return None if number < 0 else number


def _version_text(version: int) -> str:
    return "none yet" if version < 0 else f"version {version}"


def _silence_text(silent_ms: int) -> str:
    return "never heard" if silent_ms < 0 else f"{silent_ms / 1000:.1f} s"
