"""Where a job stands and how it has come there, as messages for people and programs."""

from collections.abc import Iterable, Mapping

from psserver.coordinator.core.checkpoints import Checkpoints, CommittedCheckpoint
from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.diagnosis import WorkerFacts, diagnose, facts_of
from psserver.coordinator.core.events import JobEvent
from psserver.coordinator.core.roster import GONE, PRESENT, WorkerEntry
from psserver.coordinator.core.shard_map import ShardSlot
from psserver.coordinator.core.work import RecentWork
from psserver.coordinator.host.job_waits import JobWaits
from psserver.coordinator.rpc.watch_codec import address_message
from pswire.aggregation import NO_COUNTS
from pswire.awaited import NOT_KNOWN
from pswire.membership import Member, WorkerState
from pswire.membership_codec import epoch_message, identity_message, settings_message
from pswire.names import shown_url
from pswire.privacy import Privacy
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import membership_pb2, push_pb2

EPOCH_COUNT_MAX = 16
"""Newest epochs that a status lists."""


def status_message(
    core: CoordinatorCore, waits: JobWaits, now_ms: int
) -> messages.GetStatusResponse:
    newest = core.snapshots.newest
    trained = core.model.terms
    record = core.record
    terms = core.settings.terms if record is None else record.terms
    start = core.progress.start_point
    first_clock = start.clock if start is not None else 0
    mode_clock = record.change_clock if record is not None else 0
    facts = facts_of(core, now_ms)
    found = diagnose(facts)
    started_ms = core.progress.started_ms
    samples = [
        means.samples_per_s
        for entry in core.roster.in_state(*PRESENT)
        if (means := entry.work.lately()) is not None
        and means.samples_per_s is not None
    ]
    status = messages.GetStatusResponse(
        settings=settings_message(core.settings),
        phase=messages.JobPhase.ValueType(core.phase.value),
        generation=record.generation if record is not None else 0,
        workers=_worker_statuses(core, facts.workers, now_ms),
        shards=[_shard_status(core, slot, now_ms) for slot in core.shards.slots],
        waiting_for=waits.text(now_ms),
        snapshot_version=newest.version if newest is not None else -1,
        tensor_count=len(trained.schema.entries) if trained is not None else 0,
        parameter_bytes=core.model.byte_count,
        failure=core.progress.failure,
        mode=membership_pb2.Mode.ValueType(terms.mode),
        staleness_bound=terms.staleness_bound,
        quorum=terms.quorum,
        grace_window_ms=terms.grace_window_ms,
        mode_clock=mode_clock if mode_clock != first_clock else 0,
        workers_floor=core.progress.workers_floor,
        evicted_count=core.progress.evicted_count,
        clip_grad_norm=core.model.clip_grad_norm,
        compression=str(trained.compression) if trained is not None else "",
        strategy=_strategy_text(core),
        epochs=[
            epoch_message(ledger.report)
            for ledger in core.ledger.newest(EPOCH_COUNT_MAX)
        ],
        diagnosis=messages.Diagnosis(
            cause=found.cause,
            sentence=found.sentence,
            who=found.who,
            others_wait=found.others_wait,
        ),
        elapsed_ms=-1 if started_ms is None else now_ms - started_ms,
        steps_per_s=core.shards.steps_per_s,
        samples_per_s=sum(samples) if samples else None,
        metrics=_mean_metrics(core.metrics),
    )
    if core.checkpoints.settings is not None:
        status.checkpoints.CopyFrom(checkpoint_status(core.checkpoints, now_ms))
    if trained is not None and trained.privacy is not None:
        spent_count = core.ledger.participation_count
        status.privacy.CopyFrom(_privacy_status(trained.privacy, spent_count))
    return status


def _strategy_text(core: CoordinatorCore) -> str:
    """How workers take local steps, and how long their rounds are now."""
    counts = [
        newest.round_step_count
        for entry in core.roster.in_state(*PRESENT)
        if (newest := entry.work.newest) is not None and newest.round_step_count
    ]
    text = core.model.strategy_text
    if not text or not counts:
        return text
    least, most = min(counts), max(counts)
    shown = f"{least}" if least == most else f"{least} to {most}"
    return f"{text}, {shown} local step{'s' * (most != 1)} a round"


def history_message(
    core: CoordinatorCore, unix_offset_s: float
) -> messages.GetHistoryResponse:
    """How a job has trained; `unix_offset_s` is the time when this process's was 0."""
    history = core.history
    return messages.GetHistoryResponse(
        interval_s=history.interval_ms / 1000,
        points=[
            messages.HistoryPoint(
                at_unix_s=unix_offset_s + point.at_ms / 1000,
                clock=point.clock,
                steps_per_s=point.steps_per_s,
                samples_per_s=point.samples_per_s,
                metrics=_mean_metrics(point.metrics),
            )
            for point in history.points
        ],
    )


def events_message(
    events: Iterable[JobEvent], unix_offset_s: float
) -> messages.WatchEventsResponse:
    """What has happened; as `history_message`."""
    return messages.WatchEventsResponse(
        events=[
            messages.JobEvent(
                number=event.number,
                at_unix_s=unix_offset_s + event.at_ms / 1000,
                kind=event.kind,
                text=event.text,
                worker_id=event.worker_id,
                shard_index=event.shard_index,
                clock=event.clock,
            )
            for event in events
        ]
    )


def _mean_metrics(metrics: Mapping[str, float]) -> list[messages.Metric]:
    return [messages.Metric(name=name, value=value) for name, value in metrics.items()]


def _privacy_status(privacy: Privacy, spent_count: int) -> messages.PrivacyStatus:
    return messages.PrivacyStatus(
        noise_multiplier=privacy.noise_multiplier,
        max_grad_norm=privacy.max_grad_norm,
        delta=privacy.delta,
        participation_count=spent_count,
        participation_max=privacy.participation_max,
        epsilon=privacy.epsilon_after(spent_count),
        epsilon_max=privacy.epsilons[-1],
    )


def checkpoint_status(
    checkpoints: Checkpoints, now_ms: int
) -> messages.CheckpointStatus:
    """Where the making of checkpoints stands, in a job that makes any."""
    settings, newest = checkpoints.settings, checkpoints.newest
    assert settings is not None
    status = messages.CheckpointStatus(
        url=shown_url(settings.url),
        interval=str(settings.interval),
        failure=checkpoints.waiting_text(now_ms) or checkpoints.failure,
    )
    if newest is not None:
        status.newest.CopyFrom(saved_message(newest, status.url, now_ms))
    return status


def saved_message(
    saved: CommittedCheckpoint, url: str, now_ms: int
) -> messages.SavedCheckpoint:
    """A checkpoint in a folder, whose URL is as people may see it."""
    return messages.SavedCheckpoint(
        place=membership_pb2.CheckpointPlace(url=url, name=saved.name),
        version=saved.version,
        clock=saved.clock,
        byte_count=saved.byte_count,
        age_ms=now_ms - saved.committed_ms,
    )


def _worker_statuses(
    core: CoordinatorCore, facts: Iterable[WorkerFacts], now_ms: int
) -> list[messages.WorkerStatus]:
    record = core.record
    members = {m.worker: m for m in record.members} if record is not None else {}
    clocks = {worker: core.shards.clock_of(m) for worker, m in members.items()}
    slowest = min(clocks.values(), default=0)
    peer_waits = {each.name: each.peer_wait_ms for each in facts}
    return [
        _worker_status(
            core,
            entry,
            now_ms,
            members.get(entry.worker),
            clock=clocks.get(entry.worker),
            slowest_clock=slowest,
            peer_wait_ms=peer_waits.get(entry.worker.worker_id),
        )
        for entry in core.roster.in_state(*set(WorkerState).difference(GONE))
    ]


def _worker_status(
    core: CoordinatorCore,
    entry: WorkerEntry,
    now_ms: int,
    member: Member | None,
    *,
    clock: int | None,
    slowest_clock: int,
    peer_wait_ms: float | None,
) -> messages.WorkerStatus:
    # Shards count alike; one may have reported a moment ago.
    gradients = max(
        slot.standing.gradients.get(entry.worker, NO_COUNTS)
        for slot in core.shards.slots
    )
    status = messages.WorkerStatus(
        worker=identity_message(entry.worker),
        rank=member.rank if member is not None else -1,
        state=entry.state,
        clock=0 if clock is None else clock,
        silent_ms=0 if entry.is_watching else max(0, now_ms - entry.heard_ms),
        step_ms=NOT_KNOWN if member is None else entry.step_ms(now_ms),
        address=entry.address,
        lead=0 if clock is None else clock - slowest_clock,
        shared_memory_shard_count=sum(
            entry.worker in slot.standing.sharing for slot in core.shards.slots
        ),
        gradients=messages.GradientCounts(
            bad_count=gradients.bad,
            clipped_count=gradients.clipped,
            left_out_count=gradients.left_out,
        ),
        brought_other=core.brought_other(entry),
        unreached_shards=core.reach.unreached(entry.worker, now_ms),
    )
    if entry.work.newest is not None:
        status.work.CopyFrom(_work_status(entry.work, peer_wait_ms))
    return status


def _work_status(recent: RecentWork, peer_wait_ms: float | None) -> messages.WorkStatus:
    work, means = recent.newest, recent.lately()
    assert work is not None, "it has reported"
    status = messages.WorkStatus(
        step_count=work.step_count,
        sample_count=work.sample_count,
        peer_wait_ms=peer_wait_ms,
        activity=messages.Activity.ValueType(work.activity),
        activity_ms=work.activity_ms,
        traffic=messages.Traffic(
            sent_bytes=work.sent_bytes,
            received_bytes=work.received_bytes,
            encodings=[
                messages.EncodedBytes(
                    encoding=encoding, sent_bytes=sent, received_bytes=received
                )
                for encoding, (sent, received) in sorted(work.encodings.items())
            ],
        ),
        resident_bytes=work.resident_bytes,
        round_step_count=work.round_step_count,
        steps_since_push=work.steps_since_push,
        fragment_under_way=work.fragment_under_way,
        metrics=[
            messages.Metric(name=name, value=logged.value, step=logged.step)
            for name, logged in sorted(work.metrics.items())
        ],
    )
    if means is not None:
        status.steps_per_s = means.steps_per_s
        if means.samples_per_s is not None:
            status.samples_per_s = means.samples_per_s
        status.compute_ms, status.load_ms = means.compute_ms, means.load_ms
        status.send_ms, status.wait_ms = means.send_ms, means.wait_ms
    return status


def _shard_status(
    core: CoordinatorCore, slot: ShardSlot, now_ms: int
) -> messages.ShardStatus:
    if slot.is_watching:
        state = "ready"
    elif not slot.process_id:
        state = "missing"
    else:
        state = "lost" if core.progress.failure else "suspect"
    standing = slot.standing
    status = messages.ShardStatus(
        shard=address_message(slot),
        state=state,
        silent_ms=_silent_ms(slot, now_ms),
        parameter_bytes=standing.parameter_bytes,
        optimizer_bytes=standing.optimizer_bytes,
        applied_clock=standing.applied_clock,
        version=standing.version,
        frontier=standing.frontier,
        queued_push_count=standing.queued_push_count,
        torn_step_count=standing.torn_step_count,
        staleness_counts=standing.staleness_counts,
        resident_bytes=standing.resident_bytes,
        apply_ms=slot.apply_ms,
        received_bytes=standing.received_bytes,
        sent_bytes=standing.sent_bytes,
        duplicate_count=standing.duplicate_count,
        chunk_count=standing.chunk_count,
        recording_end=standing.recording_end,
    )
    if standing.waited_ms:
        status.waiting.CopyFrom(_waiting_message(slot))
    return status


def _waiting_message(slot: ShardSlot) -> push_pb2.Waiting:
    standing = slot.standing
    return push_pb2.Waiting(
        clock=standing.applied_clock + 1,
        waited_ms=standing.waited_ms,
        reason=standing.waiting_reason,
        awaited=[
            push_pb2.Awaited(
                name=a.name, clock=a.clock, step_ms=a.step_ms, lost_ms=a.lost_ms
            )
            for a in standing.waiting_for
        ],
    )


def _silent_ms(slot: ShardSlot, now_ms: int) -> int:
    """Time since a shard's last sign of life: an open stream is one."""
    if slot.is_watching:
        return 0
    return -1 if slot.heard_ms is None else max(0, now_ms - slot.heard_ms)
