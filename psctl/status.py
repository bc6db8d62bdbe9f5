"""`psctl status`: where a job stands, for people. Programs get its document."""

import asyncio
import math
from collections.abc import Collection, Coroutine
from typing import Any, Final, TypeVar

from psctl.tables import count_text, fitted
from pswire.addresses import Address
from pswire.byte_text import byte_text
from pswire.leased_data import EpochReport
from pswire.membership import Mode, WorkerState
from pswire.names import printable
from pswire.reasons import Refusal
from pswire.status_document import Document
from psworker.errors import error_of_refusal
from psworker.launch.reachability import (
    problem_behind_call,
    unreachable,
    wait_reachable,
)
from psworker.transport.call_error import CallError
from psworker.transport.status_client import (
    CheckpointStatus,
    JobStatus,
    PrivacyStatus,
    ShardStatus,
    WorkerStatus,
    fetch_document,
    fetch_status,
)

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 2.0
"""Longest wait for something to listen there. A person looks now, not later."""

TIMEOUT_S: Final = 5.0
"""Longest wait for the coordinator's answer."""


def read_status(coordinator: Address) -> JobStatus:
    """The coordinator's answer, or an error as of `ask`."""
    return ask(
        coordinator,
        fetch_status(str(coordinator), timeout_s=TIMEOUT_S),
        timeout_s=TIMEOUT_S,
    )


def read_document(coordinator: Address) -> tuple[JobStatus, Document]:
    """As `read_status`, with the same for programs."""
    return ask(
        coordinator,
        fetch_document(str(coordinator), timeout_s=TIMEOUT_S),
        timeout_s=TIMEOUT_S,
    )


def ask(
    coordinator: Address, question: Coroutine[Any, Any, T], *, timeout_s: float
) -> T:
    """The coordinator's answer to a call that takes `timeout_s` at most."""
    try:
        wait_reachable(coordinator, CONNECT_TIMEOUT_S)
        return asyncio.run(question)
    except CallError as error:
        if error.refusal is not None:
            raise error.to_ps_error() from error
        problem = problem_behind_call(coordinator, error.code, error.text)
        raise unreachable(coordinator, timeout_s, problem) from error
    except Refusal as refusal:
        raise error_of_refusal(refusal) from refusal
    finally:
        question.close()


def lag_of(worker: WorkerStatus, status: JobStatus) -> int | None:
    """Completed clocks a member is behind the one that is ahead, None for no member.

    In BSP all have completed the same ones, also one that does not push for the next:
    `_state_text` says whether shards wait for it.
    """
    if not worker.is_member:
        return None
    return max(each.clock for each in status.workers if each.is_member) - worker.clock


def clock_of(shard: ShardStatus, mode: Mode) -> int:
    """Newest clock that all members have completed on a shard.

    Clocks are closed in BSP only; in the other modes the frontier is the same thing.
    """
    return shard.clock if mode.rules.is_clocked else shard.frontier


def status_text(status: JobStatus) -> str:
    facts = [f"{name:<12}{text}" for name, text in _facts(status) if text]
    return "\n".join(
        [
            *facts,
            "",
            "as of the last reports of the shards, usually less than 1 s old:",
            _shard_table(status),
            "",
            _worker_table(status) if status.workers else "no workers",
        ]
    )


def mode_text(mode: Mode, staleness_bound: int) -> str:
    """A mode in words, such as `ssp, at most 3 clocks apart`."""
    if not mode.rules.takes_bound:
        return mode.label
    return f"{mode.label}, at most {staleness_bound} clocks apart"


def _facts(status: JobStatus) -> list[tuple[str, str]]:
    """Names and texts; those without a text are not shown."""
    speed = "" if status.steps_per_s is None else f"{status.steps_per_s:.3g} steps/s"
    if status.samples_per_s is not None:
        speed += f", {status.samples_per_s:.4g} samples/s"
    logged = (f"{name} {value:.4g}" for name, value in status.metrics.items())
    since = f", after clock {status.mode_clock}" if status.mode_clock else ""
    version = status.snapshot_version
    clip = status.clip_grad_norm
    waits_for = printable(status.waiting_for) or "nobody"
    return [
        ("now", printable(status.diagnosis)),
        ("speed", speed),
        ("logged", printable(", ".join(logged))),
        ("job", printable(status.settings.job_id)),
        ("mode", f"{mode_text(status.mode, status.staleness_bound)}{since}"),
        ("phase", f"{status.phase}, generation {status.generation}"),
        ("evictions", _evictions_text(status)),
        (
            "model",
            f"{count_text(status.tensor_count, 'tensor')}, "
            f"{byte_text(status.parameter_bytes)}",
        ),
        (
            "snapshot",
            "none (`psctl snapshot get` makes one)"
            if version < 0
            else f"version {version}",
        ),
        ("checkpoint", _checkpoint_text(status.checkpoints)),
        ("waits for", "" if status.failure else waits_for),
        ("tensors", _transport_text(status)),
        ("cut off", _unreached_text(status)),
        ("began with", _brought_text(status)),
        ("gradients", f"clipped to a norm of {clip:g}" if clip else ""),
        ("compressed", printable(status.compression)),
        ("privacy", _privacy_text(status.privacy)),
        *(
            (
                "split",
                f"{printable(split.name)}: {split.item_count} items, digest "
                f"{printable(split.digest)[:12]}",
            )
            for split in status.splits
        ),
        ("data", _epoch_text(status.epochs[0]) if status.epochs else ""),
        ("staleness", _staleness_text(status.shards)),
        ("gradients", _gradients_text(status)),
        ("failure", printable(status.failure)),
    ]


def _checkpoint_text(checkpoints: CheckpointStatus | None) -> str:
    """The newest checkpoint, and why the last try has failed; empty without any."""
    if checkpoints is None:
        return ""
    newest = checkpoints.newest
    text = f"none yet, one every {printable(checkpoints.interval)}"
    if newest is not None:
        text = (
            f"version {newest.version}, {newest.age_ms / 1000:.0f} s ago "
            f"({printable(newest.name)}, {byte_text(newest.byte_count)})"
        )
    if checkpoints.failure:
        text += f"; the last try has failed: {printable(checkpoints.failure)}"
    return text


def _privacy_text(privacy: PrivacyStatus | None) -> str:
    """The budget that is spent, and by what it is counted; empty without any."""
    if privacy is None:
        return ""
    is_known = math.isfinite(privacy.epsilon)
    spent = f"{privacy.epsilon:.4g}" if is_known else "more than all"
    return (
        f"epsilon {spent} of {privacy.epsilon_max:.4g} spent for each sample, at delta "
        f"{privacy.delta:g}: {privacy.participation_count} of "
        f"{privacy.participation_max} participations, noise "
        f"{privacy.noise_multiplier:g} x {privacy.max_grad_norm:g}"
    )


def _evictions_text(status: JobStatus) -> str:
    """How many were evicted, and what happens on the next loss."""
    text = f"{count_text(status.evicted_count, 'worker')} evicted or replaced"
    if status.phase in ("finished", "failed"):
        return text
    return (
        f"{text}, never below {status.workers_floor}; on a loss: "
        f"{status.settings.worker_loss_policy.label}"
    )


def _brought_text(status: JobStatus) -> str:
    """Whose values the job began with, where workers brought others; else empty."""
    others = [
        f"{printable(each.worker_id)} brought other "
        f"{' and '.join(printable(what) for what in each.brought_other)}"
        for each in status.workers
        if each.brought_other
    ]
    if not others:
        return ""
    return f"the values of the worker of rank 0; {', '.join(others)}"


def _unreached_text(status: JobStatus) -> str:
    """Who gets no answer from which shards; empty when all do."""
    return ", ".join(
        f"{printable(each.worker_id)} gets no answer from shard "
        f"{' and '.join(map(str, each.unreached_shards))}"
        for each in status.workers
        if each.unreached_shards
    )


def _transport_text(status: JobStatus) -> str:
    """How tensors of members travel; empty when all go over gRPC."""
    members = [worker for worker in status.workers if worker.is_member]
    shard_count = len(status.shards)
    if all(each.shared_memory_shard_count == shard_count for each in members):
        return "through shared memory" if members else ""
    sharing = [
        f"{printable(each.worker_id)} with {each.shared_memory_shard_count} of "
        f"{count_text(shard_count, 'shard')}"
        for each in members
        if each.shared_memory_shard_count
    ]
    return f"through shared memory: {', '.join(sharing)}" if sharing else ""


def _gradients_text(status: JobStatus) -> str:
    """How gradients become updates, and whose did not count as they were sent."""
    settings = status.settings
    parts = []
    if settings.aggregation.is_robust:
        parts.append(str(settings.aggregation))
    if settings.gradient_norm_max:
        policy = settings.bad_gradient_policy.label
        parts.append(f"{policy} above a norm of {settings.gradient_norm_max:g}")
    for worker in status.workers:
        counts = worker.gradients._asdict().items()
        if said := [f"{n} {name.replace('_', ' ')}" for name, n in counts if n]:
            parts.append(f"{printable(worker.worker_id)}: {', '.join(said)}")
    return "; ".join(parts)


def _epoch_text(epoch: EpochReport) -> str:
    """How far the newest epoch is, and what was not seen exactly once."""
    other = {
        "seen more than once": epoch.seen_again,
        "torn": epoch.torn,
        "dropped": epoch.dropped,
        "skipped": epoch.skipped,
    }
    parts = [f"{count} {name}" for name, count in other.items() if count]
    state = ", over" if epoch.is_over else ""
    return ", ".join(
        [
            f"epoch {epoch.epoch} of {printable(epoch.loader)}{state}: "
            f"{epoch.seen_once} of {epoch.count} seen once",
            *parts,
        ]
    )


def _staleness_text(shards: tuple[ShardStatus, ...]) -> str:
    """How many pushes had which staleness, over all shards; empty when none had."""
    length = max((len(shard.staleness_counts) for shard in shards), default=0)
    totals = [0] * length
    for shard in shards:
        for staleness, count in enumerate(shard.staleness_counts):
            totals[staleness] += count
    total = sum(totals)
    return ", ".join(
        f"{staleness}{'+' if staleness == length - 1 else ''}: {count / total:.1%}"
        for staleness, count in enumerate(totals)
        if count
    )


def _shard_table(status: JobStatus) -> str:
    return fitted(
        (
            *("SHARD", "STATE", "CLOCK", "VERSION", "QUEUE", "TORN", "SILENT"),
            *("SIZE", "ADDRESS"),
        ),
        [
            (
                shard.shard_index,
                shard.state,
                clock_of(shard, status.mode),
                shard.version,
                shard.queued_push_count,
                shard.torn_step_count,
                _silence_text(shard.silent_ms),
                byte_text(shard.parameter_bytes),
                shard.address or "-",
            )
            for shard in status.shards
        ],
        least_useful=("TORN", "SILENT", "QUEUE", "SIZE"),
    )


def _worker_table(status: JobStatus) -> str:
    awaited = {
        other.name
        for shard in status.shards
        if shard.waiting is not None and not status.failure
        for other in shard.waiting.awaited
    }
    return fitted(
        (
            *("WORKER", "RANK", "STATE", "CLOCK", "LEAD", "LAG", "IN STEP"),
            *("LOST", "ADDRESS"),
        ),
        [
            (
                worker.worker_id,
                "-" if worker.rank < 0 else str(worker.rank),
                _state_text(worker, awaited),
                worker.clock if worker.is_member else "-",
                worker.lead if worker.is_member else "-",
                lag_of(worker, status) if worker.is_member else "-",
                "-" if worker.step_ms < 0 else f"{worker.step_ms / 1000:.1f} s",
                f"{worker.silent_ms / 1000:.1f} s" if worker.silent_ms else "-",
                worker.address or "-",
            )
            for worker in status.workers
        ],
        least_useful=("LEAD", "RANK"),
    )


def _state_text(worker: WorkerStatus, awaited: Collection[str]) -> str:
    """The state of a worker, and whether shards wait for it."""
    if not worker.is_member or worker.worker_id not in awaited:
        return worker.state
    return (
        "awaited" if worker.state is WorkerState.MEMBER else f"{worker.state}, awaited"
    )


def _silence_text(silent_ms: int) -> str:
    return "never" if silent_ms < 0 else f"{silent_ms / 1000:.1f} s"
