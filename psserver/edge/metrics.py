"""What a daemon measures, for Prometheus: one table for each kind of daemon.

Nothing is kept here. A row reads what the daemon knows anyway, when somebody asks.
`docs/metrics.md` lists the same rows. Names are as Prometheus wants them: `ps_` first,
base units, `_total` after what only grows. A label has few values, whoever calls:
workers are those who are members now, or the names that their scripts have logged.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import override

from psserver.edge.access import Access
from psserver.edge.admin import AdminPort
from psserver.edge.open_calls import OpenCalls
from psserver.edge.shared_answer import SharedAnswer
from pswire.membership import Mode, Outcome, WorkerState
from pswire.membership_codec import known
from pswire.metric_rows import Labelled, Metric
from pswire.reasons import ErrorReason
from pswire.status_document import foremost_clock, phase_name
from pswire.v1 import coordinator_service_pb2 as messages


def metrics_route(*collectors: Collector) -> Route:
    """`/metrics`, in the format that the caller accepts."""
    registry = CollectorRegistry()
    for each in collectors:
        registry.register(each)
    ProcessCollector(registry=registry)

    formats = {asked: _format(registry, asked) for asked in ("", _OPEN_METRICS)}

    async def metrics(request: Request) -> Response:
        # What else a caller says of a format would have as many answers kept.
        is_open = _OPEN_METRICS in request.headers.get("accept", "")
        answer, content_type = formats[_OPEN_METRICS if is_open else ""]
        return Response(await answer.get(), media_type=content_type)

    return Route("/metrics", metrics)


_OPEN_METRICS: Final = "application/openmetrics-text"


def _format(registry: CollectorRegistry, asked: str) -> tuple[SharedAnswer, str]:
    """What answers in a format, and its content type."""
    encode, content_type = choose_encoder(asked)

    async def make() -> bytes:
        # Here what changes is read, and beside the event loop it is written down.
        return await asyncio.to_thread(encode, _Collected(list(registry.collect())))

    return SharedAnswer(make), content_type


@dataclass(frozen=True, slots=True)
class _Collected(Collector):
    """What was read, as a registry gives it."""

    families: list[Family]

    @override
    def collect(self) -> Iterable[Family]:
        return self.families


# Every daemon


@dataclass(slots=True)
class Process:
    """A daemon's process.

    Attributes:
        role: What it is.
        calls: Calls of its gRPC port.
        access: Who may call, None for everybody.
        admin: Its admin port, once it has one.
    """

    role: str
    calls: OpenCalls
    access: Access | None
    admin: AdminPort | None = None

    @property
    def refused_calls(self) -> Labelled:
        """Calls that were not let in, by the reason."""
        denied = Counter[ErrorReason]() if self.access is None else self.access.refused
        counts = self.calls.refused + denied
        # All from the start: the rate of a series that begins at 1 misses the first.
        return [
            ((reason.name.lower(),), counts[reason])
            for reason in sorted({*_REFUSALS, *counts})
        ]


_REFUSALS: Final = (
    ErrorReason.BUSY,
    ErrorReason.LIMIT_EXCEEDED,
    ErrorReason.UNAUTHENTICATED,
    ErrorReason.PERMISSION_DENIED,
)

PROCESS: Final[tuple[Metric[Process], ...]] = (
    Metric(
        "ps_build_info",
        "Always 1; its labels say what runs.",
        lambda p: [((p.role, version("paramserver")), 1)],
        ("role", "version"),
    ),
    Metric(
        "ps_ready",
        "1 where `/readyz` answers 200, else 0.",
        lambda p: p.admin and not p.admin.unready_reason,
    ),
    Metric("ps_calls_open", "gRPC calls under way.", lambda p: p.calls.count),
    Metric(
        "ps_calls_refused_total",
        "gRPC calls that were not let in: `busy` and `limit_exceeded` by a limit, "
        "`unauthenticated` and `permission_denied` by what they showed.",
        lambda p: p.refused_calls,
        ("reason",),
    ),
    Metric(
        "ps_connections_ended_total",
        "gRPC connections that were ended: `unread` answers, `surplus` of one machine, "
        "or `idle` in a process without room.",
        lambda p: [((reason,), n) for reason, n in sorted(p.calls.ended.items())],
        ("reason",),
    ),
    Metric(
        "ps_admin_connections",
        "Connections to the admin port.",
        lambda p: p.admin and p.admin.connection_count,
    ),
    Metric(
        "ps_admin_connections_refused_total",
        "Connections to the admin port that were ended for want of room.",
        lambda p: p.admin and p.admin.refused_count,
    ),
)


# A coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReadings:
    """What a coordinator knows of its job now.

    Attributes:
        status: As `psctl status` has it.
        causes: Every cause that a diagnosis may name.
        sample_count: Samples that this process has heard of.
        version: Steps of all workers that every shard has applied.
        checkpoint_count: Checkpoints that this process has completed.
        checkpoint_failure_count: Tries that have failed.
        checkpoint_ms: What the last one took from its cut on; None before.
        is_state_written: Whether its disk takes changes of its state.
    """

    status: messages.GetStatusResponse
    causes: Sequence[str]
    sample_count: int
    version: int
    checkpoint_count: int
    checkpoint_failure_count: int
    checkpoint_ms: int | None
    is_state_written: bool

    @property
    def members(self) -> "Iterable[messages.WorkerStatus]":
        """Workers that are members now."""
        return (each for each in self.status.workers if each.rank >= 0)

    def of_members(
        self, read: "Callable[[messages.WorkerStatus], float | None]"
    ) -> Labelled:
        """A value of each member, by its id."""
        return [((each.worker.worker_id,), read(each)) for each in self.members]

    def of_work(
        self, read: "Callable[[messages.WorkStatus], float | None]"
    ) -> Labelled:
        """The same of what each has said of itself."""
        return self.of_members(lambda w: read(w.work) if w.HasField("work") else None)

    def of_shards(
        self, read: "Callable[[messages.ShardStatus], float | None]"
    ) -> Labelled:
        """A value of each shard, by its index."""
        return [((each.shard.shard_index,), read(each)) for each in self.status.shards]

    @property
    def newest_checkpoint(self) -> "messages.SavedCheckpoint | None":
        """The newest checkpoint that is complete."""
        found = self.status.checkpoints
        return found.newest if found.HasField("newest") else None


def _one_of(names: Iterable[str], chosen: str) -> Labelled:
    """1 for the chosen one of some names, 0 for all others."""
    return [((name,), name == chosen) for name in names]


def _optional(message: Any, field: str) -> float | None:  # noqa: ANN401, any message
    return getattr(message, field) if message.HasField(field) else None


def _step_parts(j: JobReadings) -> Labelled:
    """What each part of a step takes each member lately, in seconds."""
    return [
        ((each.worker.worker_id, part), value / 1000)
        for each in j.members
        if each.HasField("work")
        for part in ("compute", "load", "send", "wait", "peer_wait")
        if (value := _optional(each.work, f"{part}_ms")) is not None
    ]


def _encoded(j: JobReadings) -> Labelled:
    """Bytes of gradients and values of all members, by direction and encoding."""
    sums: Counter[tuple[str, str]] = Counter()
    for each in j.members:
        for one in each.work.traffic.encodings:
            sums["to_shards", one.encoding] += one.sent_bytes
            sums["to_workers", one.encoding] += one.received_bytes
    return sorted(sums.items())


def _gradients(j: JobReadings) -> Labelled:
    """Gradients of each member that did not count as they were sent."""
    return [
        ((each.worker.worker_id, what), getattr(each.gradients, f"{what}_count"))
        for each in j.members
        for what in ("bad", "clipped", "left_out")
    ]


def _lags(j: JobReadings) -> Labelled:
    """Clocks that each member is behind the fastest one."""
    foremost = foremost_clock(j.status.workers)
    return j.of_members(lambda w: foremost - w.clock)


def _awaited(j: JobReadings) -> Labelled:
    """1 for each member that a shard waits for, else 0."""
    shards = j.status.shards
    names = {each.name for shard in shards for each in shard.waiting.awaited}
    return j.of_members(lambda w: w.worker.worker_id in names)


def _positions(j: JobReadings) -> Labelled:
    """Positions of the newest epoch by what became of them."""
    names = ("seen_once", "seen_again", "torn", "dropped", "skipped", "never")
    return [
        ((name,), getattr(epoch, f"{name}_count"))
        for epoch in j.status.epochs[:1]
        for name in names
    ]


_PHASES: Final = ("waiting", "seeding", "running", "finished", "failed")

JOB: Final[tuple[Metric[JobReadings], ...]] = (
    Metric(
        "ps_job_info",
        "Always 1; its label is the job's id.",
        lambda j: [((j.status.settings.job_id,), 1)],
        ("job_id",),
    ),
    Metric(
        "ps_job_phase",
        "1 for the phase that the job is in.",
        lambda j: _one_of(_PHASES, phase_name(j.status.phase)),
        ("phase",),
    ),
    Metric(
        "ps_job_mode",
        "1 for the mode that the job is in.",
        lambda j: _one_of(Mode.labels(), known(Mode, j.status.mode).label),
        ("mode",),
    ),
    Metric(
        "ps_job_cause",
        "1 for what the job does or, if it is slow or waits, why: the word of the "
        "diagnosis.",
        lambda j: _one_of(j.causes, j.status.diagnosis.cause),
        ("cause",),
    ),
    Metric(
        "ps_job_generation",
        "Grows when workers join or leave, or the mode changes.",
        lambda j: j.status.generation,
    ),
    Metric(
        "ps_job_steps",
        "Steps of all workers that every shard has applied; less after a return to a "
        "checkpoint.",
        lambda j: j.version,
    ),
    Metric(
        "ps_job_clock",
        "Largest clock that all members have completed.",
        lambda j: min((each.frontier for each in j.status.shards), default=None),
    ),
    Metric(
        "ps_job_steps_per_second",
        "Steps of all workers lately.",
        lambda j: _optional(j.status, "steps_per_s"),
    ),
    Metric(
        "ps_job_samples_total",
        "Samples behind the steps that workers have reported, as far as they are "
        "counted.",
        lambda j: j.sample_count,
    ),
    Metric(
        "ps_job_samples_per_second",
        "Samples of all workers lately.",
        lambda j: _optional(j.status, "samples_per_s"),
    ),
    Metric(
        "ps_job_logged",
        "What scripts have logged last by `ps.log(loss=...)`, a mean over the workers.",
        lambda j: [((each.name,), each.value) for each in j.status.metrics],
        ("name",),
    ),
    Metric(
        "ps_job_encoded_bytes",
        "Bytes of gradients (`to_shards`) and values (`to_workers`) that the members "
        "have sent and received, by encoding.",
        _encoded,
        ("direction", "encoding"),
    ),
    Metric(
        "ps_job_evictions_total",
        "Workers that were evicted or replaced.",
        lambda j: j.status.evicted_count,
    ),
    Metric(
        "ps_job_workers",
        "Workers in each state.",
        lambda j: [
            ((state.value,), sum(each.state == state for each in j.status.workers))
            for state in WorkerState
        ],
        ("state",),
    ),
    Metric(
        "ps_job_positions",
        "Data of the newest epoch: how many positions had which fate.",
        _positions,
        ("fate",),
    ),
    Metric(
        "ps_job_privacy_epsilon",
        "The epsilon that is spent; only of a job with differential privacy.",
        lambda j: j.status.privacy.epsilon if j.status.HasField("privacy") else None,
    ),
    Metric(
        "ps_worker_clock",
        "Clocks that a member has completed.",
        lambda j: j.of_members(lambda w: w.clock),
        ("worker",),
    ),
    Metric(
        "ps_worker_lag_clocks",
        "Clocks that a member is behind the fastest one.",
        _lags,
        ("worker",),
    ),
    Metric(
        "ps_worker_lease_age_seconds",
        "Time since a member's last sign of life; 0 while its connection is open.",
        lambda j: j.of_members(lambda w: w.silent_ms / 1000),
        ("worker",),
    ),
    Metric(
        "ps_worker_in_step_seconds",
        "For how long a member has been in its step.",
        lambda j: j.of_members(lambda w: None if w.step_ms < 0 else w.step_ms / 1000),
        ("worker",),
    ),
    Metric(
        "ps_worker_awaited",
        "1 for a member that a shard waits for, else 0.",
        _awaited,
        ("worker",),
    ),
    Metric(
        "ps_worker_steps",
        "Steps of a member's optimizers since it joined.",
        lambda j: j.of_work(lambda w: w.step_count),
        ("worker",),
    ),
    Metric(
        "ps_worker_step_part_seconds",
        "What a step of a member takes lately: `compute`, `load` data, `send`, `wait` "
        "for answers, and of that `peer_wait` for the pushes of others.",
        _step_parts,
        ("worker", "part"),
    ),
    Metric(
        "ps_worker_sent_bytes",
        "Bytes of a member's messages to shards since it joined.",
        lambda j: j.of_work(lambda w: w.traffic.sent_bytes),
        ("worker",),
    ),
    Metric(
        "ps_worker_received_bytes",
        "Bytes of those from shards.",
        lambda j: j.of_work(lambda w: w.traffic.received_bytes),
        ("worker",),
    ),
    Metric(
        "ps_worker_resident_memory_bytes",
        "Memory of a member's process.",
        lambda j: j.of_work(lambda w: w.resident_bytes or None),
        ("worker",),
    ),
    Metric(
        "ps_worker_gradients",
        "Gradients of a member that did not count as they were sent: `bad`, `clipped`, "
        "or `left_out` by the rule of aggregation.",
        _gradients,
        ("worker", "fate"),
    ),
    Metric(
        "ps_shard_up",
        "1 for a shard whose connection to the coordinator is open, else 0.",
        lambda j: j.of_shards(lambda s: s.state == "ready"),
        ("shard",),
    ),
    Metric(
        "ps_shard_silence_seconds",
        "Time since a shard's last sign of life; 0 while its connection is open.",
        lambda j: j.of_shards(
            lambda s: None if s.silent_ms < 0 else s.silent_ms / 1000
        ),
        ("shard",),
    ),
    Metric(
        "ps_snapshot_version",
        "Version of the newest snapshot, if there is one.",
        lambda j: None if j.status.snapshot_version < 0 else j.status.snapshot_version,
    ),
    Metric(
        "ps_checkpoint_age_seconds",
        "Time since the newest checkpoint was complete.",
        lambda j: (found := j.newest_checkpoint) and found.age_ms / 1000,
    ),
    Metric(
        "ps_checkpoint_version",
        "Steps of all workers that are in the newest checkpoint.",
        lambda j: (found := j.newest_checkpoint) and found.version,
    ),
    Metric(
        "ps_checkpoint_bytes",
        "Size of the newest checkpoint.",
        lambda j: (found := j.newest_checkpoint) and found.byte_count,
    ),
    Metric(
        "ps_checkpoint_duration_seconds",
        "What the last checkpoint took, from its cut until it was complete.",
        lambda j: None if j.checkpoint_ms is None else j.checkpoint_ms / 1000,
    ),
    Metric(
        "ps_checkpoints_total",
        "Checkpoints that were completed.",
        lambda j: j.checkpoint_count,
    ),
    Metric(
        "ps_checkpoint_failures_total",
        "Tries to make a checkpoint that have failed.",
        lambda j: j.checkpoint_failure_count,
    ),
    Metric(
        "ps_checkpoint_failing",
        "1 where the last try to make a checkpoint has failed, or takes too long.",
        lambda j: bool(j.status.checkpoints.failure),
    ),
    Metric(
        "ps_state_written",
        "1 where the disk takes changes of the coordinator's state, else 0.",
        lambda j: j.is_state_written,
    ),
)

# A shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReadings:
    """What a shard knows of itself now.

    Attributes:
        report: As the coordinator gets it.
        outcomes: Pushes that are done, by what became of them.
        waits_for: What its next clock waits for: `members`, the `coordinator`, or
            something `else`; empty for nothing.
    """

    report: messages.ReportProgressRequest
    outcomes: Mapping[Outcome, int]
    waits_for: str

    @property
    def waited_s(self) -> Labelled:
        """For how long it has waited, by what for."""
        waited_s = self.report.waiting.waited_ms / 1000
        return [
            ((what,), waited_s if what == self.waits_for else 0)
            for what in ("members", "coordinator", "else")
        ]


SHARD: Final[tuple[Metric[ShardReadings], ...]] = (
    Metric(
        "ps_shard_info",
        "Always 1; its labels say which shard of which job this is.",
        lambda s: [((s.report.job_id, s.report.shard_index), 1)],
        ("job_id", "shard"),
    ),
    Metric(
        "ps_shard_steps",
        "Steps of all workers that it has applied; less after a return to a "
        "checkpoint.",
        lambda s: s.report.version,
    ),
    Metric(
        "ps_shard_clock",
        "Highest clock that is complete.",
        lambda s: s.report.applied_clock,
    ),
    Metric(
        "ps_shard_pushes_total",
        "Pushes that are done: `applied`, `skipped` since their gradient or its clock "
        "is not finite, or `dropped` as late ones.",
        lambda s: [((o.label,), n) for o, n in sorted(s.outcomes.items())],
        ("outcome",),
    ),
    Metric(
        "ps_shard_duplicates_total",
        "Pushes that were sent again and were done already.",
        lambda s: s.report.duplicate_count,
    ),
    Metric(
        "ps_shard_torn_steps_total",
        "Steps of evicted workers of which a part was applied.",
        lambda s: s.report.torn_step_count,
    ),
    Metric(
        "ps_shard_queued_pushes",
        "Pushes that have begun to arrive and are not done.",
        lambda s: s.report.queued_push_count,
    ),
    Metric(
        "ps_shard_apply_seconds_total",
        "Time that its threads have applied updates for, all together.",
        lambda s: s.report.apply_s,
    ),
    Metric(
        "ps_shard_staleness",
        "Updates between the values that a gradient comes from and its push. Counted "
        "in SSP and ASP, from 63 on as 63.",
        lambda s: s.report.staleness_counts,
        is_histogram=True,
    ),
    Metric(
        "ps_shard_waiting_seconds",
        "For how long its next clock has waited, when that is long: for `members`, the "
        "`coordinator`, or something `else`.",
        lambda s: s.waited_s,
        ("reason",),
    ),
    Metric(
        "ps_shard_awaited_seconds",
        "Of a member that is waited for now, for how long it has been in its step.",
        lambda s: [
            ((each.name,), max(0, each.step_ms) / 1000)
            for each in s.report.waiting.awaited
        ],
        ("worker",),
    ),
    Metric(
        "ps_shard_member_waited_seconds",
        "For how long pushes of a member were here and waited for others, since it "
        "joined: least for the one that holds the others up.",
        lambda s: [((w.worker.worker_id,), w.waited_s) for w in s.report.waits],
        ("worker",),
    ),
    Metric(
        "ps_shard_received_bytes_total",
        "Bytes of the messages of its data plane that it was sent.",
        lambda s: s.report.received_bytes,
    ),
    Metric(
        "ps_shard_sent_bytes_total",
        "Bytes of those that it has sent.",
        lambda s: s.report.sent_bytes,
    ),
    Metric(
        "ps_shard_parameter_bytes",
        "Bytes of parameters that it holds.",
        lambda s: s.report.parameter_bytes,
    ),
    Metric(
        "ps_shard_optimizer_bytes",
        "Bytes of optimizer state that it holds.",
        lambda s: s.report.optimizer_bytes,
    ),
    Metric("ps_shard_chunks", "Chunks that it holds.", lambda s: s.report.chunk_count),
    Metric(
        "ps_shard_sharing_members",
        "Members whose tensors go through memory that it shares with them.",
        lambda s: len(s.report.sharing),
    ),
)

TABLES: Final[Mapping[str, tuple[Metric[Any], ...]]] = {
    "Every daemon": PROCESS,
    "A coordinator": JOB,
    "A shard": SHARD,
}
"""All rows, by what exports them."""
