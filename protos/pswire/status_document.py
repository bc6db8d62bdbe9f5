"""Where a job stands, as JSON: one place for what programs and pages read.

`docs/psctl.md` describes every name. They keep their meaning within a
`SCHEMA_VERSION`; new ones may be added. Unknown is `None`, never a magic number.
"""

import math
from collections.abc import Iterable
from typing import Any, Final

from pswire.awaited import NOT_KNOWN
from pswire.job_settings import JobSettings
from pswire.membership import Mode, ModeTerms
from pswire.membership_codec import known, read_epoch, read_settings
from pswire.v1 import coordinator_service_pb2 as pb
from pswire.v1 import push_pb2

SCHEMA_VERSION: Final = 2

Document = dict[str, Any]
"""What `json.dumps` takes as it is."""


def status_document(response: pb.GetStatusResponse, coordinator: str) -> Document:
    """Where a job stands.

    Args:
        response: The coordinator's answer.
        coordinator: Where it was asked, as `HOST:PORT`.

    Raises:
        Refusal: `MALFORMED_MESSAGE` for a mode that only a newer release knows.
    """
    mode, foremost = known(Mode, response.mode), foremost_clock(response.workers)
    return {
        "schema_version": SCHEMA_VERSION,
        "coordinator": coordinator,
        "admin_url": response.admin_url or None,
        "diagnosis": {
            "cause": response.diagnosis.cause or None,
            "sentence": response.diagnosis.sentence or None,
            "who": list(response.diagnosis.who),
            "others_wait": response.diagnosis.others_wait,
        },
        "job": _settings(read_settings(response.settings)),
        "phase": phase_name(response.phase),
        **terms_document(
            ModeTerms(
                mode,
                response.staleness_bound,
                response.quorum,
                response.grace_window_ms,
            )
        ),
        "mode_clock": response.mode_clock,
        "generation": response.generation,
        "workers_floor": response.workers_floor,
        "evicted_count": response.evicted_count,
        "elapsed_s": None if response.elapsed_ms < 0 else response.elapsed_ms / 1000,
        "steps_per_s": _optional(response, "steps_per_s"),
        "samples_per_s": _optional(response, "samples_per_s"),
        "metrics": metrics_of(response.metrics),
        "waiting_for": response.waiting_for or None,
        "failure": response.failure or None,
        "clip_grad_norm": response.clip_grad_norm or None,
        "compression": response.compression or None,
        "strategy": response.strategy or None,
        "snapshot_version": _known(response.snapshot_version),
        "tensor_count": response.tensor_count,
        "parameter_bytes": response.parameter_bytes,
        "workers": [_worker(worker, foremost) for worker in response.workers],
        "shards": [_shard(shard, mode) for shard in response.shards],
        "splits": [
            {
                "name": split.name,
                "digest": split.digest,
                "item_count": split.item_count,
                "recorder": split.recorder,
            }
            for split in response.splits
        ],
        "epochs": [_epoch(epoch) for epoch in response.epochs],
        "checkpoints": (
            _checkpoints(response.checkpoints)
            if response.HasField("checkpoints")
            else None
        ),
        "privacy": (
            _privacy(response.privacy) if response.HasField("privacy") else None
        ),
    }


def history_document(response: pb.GetHistoryResponse) -> Document:
    """How a job has trained over time."""
    return {
        "schema_version": SCHEMA_VERSION,
        "interval_s": response.interval_s,
        "points": [
            {
                "at_unix_s": point.at_unix_s,
                "clock": point.clock,
                "steps_per_s": point.steps_per_s,
                "samples_per_s": _optional(point, "samples_per_s"),
                "metrics": metrics_of(point.metrics),
            }
            for point in response.points
        ],
    }


def events_document(response: pb.WatchEventsResponse) -> Document:
    """What has happened to a job, oldest first."""
    return {
        "schema_version": SCHEMA_VERSION,
        "events": [event_document(event) for event in response.events],
    }


def event_document(event: pb.JobEvent) -> Document:
    """One event."""
    return {
        "number": event.number,
        "at_unix_s": event.at_unix_s,
        "kind": event.kind,
        "text": event.text,
        "worker_id": event.worker_id or None,
        "shard_index": _optional(event, "shard_index"),
        "clock": _optional(event, "clock"),
    }


def metrics_of(messages: Iterable[pb.Metric]) -> dict[str, float | None]:
    """Logged values by name; what is no finite number is None."""
    return {each.name: _finite(each.value) for each in messages}


def foremost_clock(workers: Iterable[pb.WorkerStatus]) -> int:
    """Clocks that the member which is ahead has completed; 0 without members.

    In BSP all have completed the same ones, also one that does not push for the next.
    """
    return max((each.clock for each in workers if each.rank >= 0), default=0)


def phase_name(phase: pb.JobPhase.ValueType) -> str:
    """A phase as people read it; one of a newer release by its number."""
    return _name(pb.JobPhase, phase, "JOB_PHASE_")


def _name(kind: Any, value: int, prefix: str) -> str:  # noqa: ANN401, any enum
    try:
        name: str = kind.Name(value)
    except ValueError:
        return f"unknown ({value})"
    return name.removeprefix(prefix).lower()


def _settings(settings: JobSettings) -> Document:
    return {
        "job_id": settings.job_id,
        "shard_count": settings.shard_count,
        "workers_min": settings.workers_min,
        "lease_ttl_ms": settings.lease_ttl_ms,
        "worker_loss_policy": settings.worker_loss_policy.label,
        "step_atomicity": settings.step_atomicity.label,
        "backup_worker_count": settings.backup_worker_count,
        "staleness_scaling": settings.is_staleness_scaled,
        "delay_compensation": settings.delay_compensation,
        "chunk_bytes": settings.chunk_bytes or None,
        "aggregation": str(settings.aggregation),
        "gradient_norm_max": settings.gradient_norm_max or None,
        "bad_gradient_policy": settings.bad_gradient_policy.label,
    }


def _worker(worker: pb.WorkerStatus, foremost: int) -> Document:
    is_member = worker.rank >= 0
    return {
        "worker_id": worker.worker.worker_id,
        "incarnation": worker.worker.incarnation,
        "rank": _known(worker.rank),
        "state": worker.state,
        "clock": worker.clock if is_member else None,
        "lead": worker.lead if is_member else None,
        "lag": foremost - worker.clock if is_member else None,
        "silent_ms": _known(worker.silent_ms),
        "step_ms": _known(worker.step_ms),
        "address": worker.address or None,
        "shared_memory_shard_count": worker.shared_memory_shard_count,
        "brought_other": list(worker.brought_other),
        "unreached_shards": list(worker.unreached_shards),
        "bad_gradient_count": worker.gradients.bad_count,
        "clipped_gradient_count": worker.gradients.clipped_count,
        "left_out_gradient_count": worker.gradients.left_out_count,
        **_work(worker),
    }


def _work(worker: pb.WorkerStatus) -> Document:
    """What a worker has said of itself; all unknown before it has."""
    work, is_known = worker.work, worker.HasField("work")
    metrics = metrics_of(work.metrics)
    return {
        "step_count": work.step_count if is_known else None,
        "sample_count": work.sample_count or None,
        "loss": metrics.get("loss"),
        "metrics": metrics,
        "steps_per_s": _optional(work, "steps_per_s"),
        "samples_per_s": _optional(work, "samples_per_s"),
        "compute_ms": _optional(work, "compute_ms"),
        "data_wait_ms": _optional(work, "load_ms"),
        "send_ms": _optional(work, "send_ms"),
        "answer_wait_ms": _optional(work, "wait_ms"),
        "peer_wait_ms": _optional(work, "peer_wait_ms"),
        "activity": activity_name(work.activity),
        "activity_ms": work.activity_ms if work.activity else None,
        "sent_bytes": work.traffic.sent_bytes if is_known else None,
        "received_bytes": work.traffic.received_bytes if is_known else None,
        "encodings": [
            {
                "encoding": each.encoding,
                "sent_bytes": each.sent_bytes,
                "received_bytes": each.received_bytes,
            }
            for each in work.traffic.encodings
        ],
        "resident_bytes": work.resident_bytes or None,
        "round_step_count": work.round_step_count or None,
        "steps_since_push": work.steps_since_push if work.round_step_count else None,
        "fragment_under_way": work.fragment_under_way or None,
    }


def activity_name(activity: pb.Activity.ValueType) -> str | None:
    """What a worker does, None where that is not known."""
    return _name(pb.Activity, activity, "ACTIVITY_") if activity else None


def _shard(shard: pb.ShardStatus, mode: Mode) -> Document:
    counts = list(shard.staleness_counts)
    while counts and not counts[-1]:
        counts.pop()
    # Clocks are closed in BSP only; in the other modes the frontier is the same thing.
    clock = shard.applied_clock if mode.rules.is_clocked else shard.frontier
    return {
        "shard_index": shard.shard.shard_index,
        "incarnation": shard.shard.incarnation,
        "state": shard.state,
        "address": shard.shard.address or None,
        "silent_ms": _known(shard.silent_ms),
        "parameter_bytes": shard.parameter_bytes,
        "optimizer_bytes": shard.optimizer_bytes,
        "clock": clock,
        "frontier": shard.frontier,
        "version": shard.version,
        "queued_push_count": shard.queued_push_count,
        "torn_step_count": shard.torn_step_count,
        "staleness_counts": counts,
        "waiting": _waiting(shard.waiting) if shard.HasField("waiting") else None,
        "resident_bytes": shard.resident_bytes or None,
        "apply_ms": _optional(shard, "apply_ms"),
        "received_bytes": shard.received_bytes,
        "sent_bytes": shard.sent_bytes,
        "duplicate_count": shard.duplicate_count,
        "chunk_count": shard.chunk_count,
        "recording_end": shard.recording_end or None,
    }


def _waiting(waiting: push_pb2.Waiting) -> Document:
    return {
        "clock": waiting.clock,
        "waited_ms": waiting.waited_ms,
        "reason": waiting.reason,
        "awaited": [
            {
                "name": other.name,
                "clock": other.clock,
                "silent_ms": _known(other.step_ms),
                "lost_ms": _known(other.lost_ms),
            }
            for other in waiting.awaited
        ],
    }


def _epoch(message: pb.EpochAccount) -> Document:
    epoch = read_epoch(message)
    return {
        "loader": epoch.loader,
        "epoch": epoch.epoch,
        "over": epoch.is_over,
        "position_count": epoch.count,
        "seen_once_count": epoch.seen_once,
        "seen_again_count": epoch.seen_again,
        "torn_count": epoch.torn,
        "dropped_count": epoch.dropped,
        "skipped_count": epoch.skipped,
        "never_count": epoch.never,
        "held_count": epoch.held,
        "left_out_count": epoch.left_out,
    }


def _checkpoints(checkpoints: pb.CheckpointStatus) -> Document:
    newest = checkpoints.newest
    return {
        "url": checkpoints.url,
        "interval": checkpoints.interval,
        "newest": {
            "url": newest.place.url,
            "name": newest.place.name,
            "version": newest.version,
            "clock": newest.clock,
            "byte_count": newest.byte_count,
            "age_ms": newest.age_ms,
        }
        if checkpoints.HasField("newest")
        else None,
        "failure": checkpoints.failure or None,
    }


def _privacy(privacy: pb.PrivacyStatus) -> Document:
    return {
        "noise_multiplier": privacy.noise_multiplier,
        "max_grad_norm": privacy.max_grad_norm,
        "delta": privacy.delta,
        "participation_count": privacy.participation_count,
        "participation_max": privacy.participation_max,
        "epsilon": _finite(privacy.epsilon),
        "epsilon_max": privacy.epsilon_max,
    }


def terms_document(terms: ModeTerms) -> dict[str, object]:
    """A mode with its numbers, null where it takes none."""
    rules = terms.mode.rules
    return {
        "mode": terms.mode.label,
        "staleness_bound": rules.lag_max(terms.staleness_bound),
        "quorum": terms.quorum if rules.has_quorum else None,
        "grace_window_s": terms.grace_window_ms / 1000 if rules.has_quorum else None,
    }


def terms_of_document(document: Document) -> ModeTerms:
    """The mode of a document, with its numbers."""
    return ModeTerms.of(
        Mode.labelled(document["mode"]),
        staleness_bound=document["staleness_bound"] or 0,
        quorum=document["quorum"] or 0,
        grace_window_ms=round((document["grace_window_s"] or 0) * 1000),
    )


def _optional(message: Any, name: str) -> Any:  # noqa: ANN401, any message and field
    value = getattr(message, name) if message.HasField(name) else None
    return _finite(value) if isinstance(value, float) else value


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _known(number: int) -> int | None:
    return None if number <= NOT_KNOWN else number
