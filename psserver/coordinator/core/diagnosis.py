"""What a job is doing and, if it is slow or waits, why and for whom: one sentence.

In BSP all workers make their steps together, so that a mean step takes all of them as
long. Who holds the others up is who waits least for them: `own_ms` of its step is its
own, and of that what the others have not names the cause.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.roster import PRESENT, WorkerEntry
from psserver.coordinator.core.work import StepMeans
from psserver.edge.coordinator_settings import JobPhase
from pswire.activity import Activity
from pswire.membership import WorkerState

SLOWER_FACTOR = 1.5
"""A worker is slow whose own part of a step is so many times that of the others ..."""

SLOWER_MS_MIN = 5.0
"""... and so much longer at least: below, it is noise of a step of milliseconds."""

SHARE_MIN = 0.4
"""Part of a step from which one of its causes is named, where all workers have it."""

LINK_MS_MIN = 20.0
"""Time on the link in a step from which it may be named slow for all workers."""

LINK_BYTES_PER_S_MAX = 50e6
"""Bytes that a slow link carries in a second: with more the model is large."""

SHORT_EPOCH_STEPS_MAX = 16.0
"""Steps of each worker in an epoch up to which its ends may be named."""

NAME_COUNT_MAX = 3
"""Names in a sentence."""

FULL_DISK_TEXTS = (
    "No space left on device",
    "Disk quota exceeded",
    "Read-only file system",
    "disk is full",
    "File too large",
)
"""How systems and SQLite say that a disk takes nothing."""


class Cause(StrEnum):
    """What a sentence is about, by the word that clients see."""

    STARTING = "starting"
    TOO_FEW_WORKERS = "too_few_workers"
    STRAGGLER = "straggler"
    SLOW_LINK = "slow_link"
    WAITING_FOR_DATA = "waiting_for_data"
    SHORT_EPOCHS = "short_epochs"
    DISK = "disk"
    WORKER_LOST = "worker_lost"
    SHARD_LOST = "shard_lost"
    CHECKPOINT_FAILING = "checkpoint_failing"
    TRAINING = "training"
    FINISHED = "finished"
    FAILED = "failed"


CURES = {
    Cause.STRAGGLER: "see what else its machine does",
    Cause.WAITING_FOR_DATA: (
        "give the loader more processes (num_workers), or the data a faster place"
    ),
    Cause.SHORT_EPOCHS: (
        "let an epoch have more batches, such as several passes over the data"
    ),
    Cause.SLOW_LINK: (
        "send less (prepare(compression=...)), less often (prepare(strategy=...)), or "
        "while it computes (prepare(overlap=True))"
    ),
}
"""What to do where steps are slow; docs/troubleshooting.md has more."""

OTHER_MODE = ", or choose a mode that waits less (psctl mode)"
"""What else helps where others wait for a straggler."""

LONGER_ROUNDS = (
    "let rounds have more local steps (every=...), or send less "
    "(prepare(compression=...))"
)
"""What to do about a slow link where workers take local steps already."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a job is doing.

    Attributes:
        cause: In a word.
        sentence: In a sentence, for a person.
        who: Workers and shards that it is about.
        others_wait: Whether other workers wait for those.
    """

    cause: Cause
    sentence: str
    who: tuple[str, ...] = ()
    others_wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A member.

    Attributes:
        name: Its id.
        lost_ms: Time without a sign of life; 0 while there is one.
        steps: What its steps take lately; None where that is not known.
        peer_wait_ms: Of a step, how long its push waits for those of others; None where
            that is not known.
        activity: What it does now.
        activity_ms: For how long it has done that.
        is_awaited: Whether shards have waited for it for seconds.
        shares_memory: Whether its tensors go through memory that all shards share.
        takes_local_steps: Whether a step of the job is a round of them.
    """

    name: str
    lost_ms: int = 0
    steps: StepMeans | None = None
    peer_wait_ms: float | None = None
    activity: Activity = Activity.UNKNOWN
    activity_ms: int = 0
    is_awaited: bool = False
    shares_memory: bool = False
    takes_local_steps: bool = False

    @property
    def unit(self) -> str:
        """What the script makes between two pushes, in a word."""
        return "round" if self.takes_local_steps else "step"

    def cure(self, cause: Cause) -> str:
        """What to do."""
        is_long = cause is Cause.SLOW_LINK and self.takes_local_steps
        return LONGER_ROUNDS if is_long else CURES[cause]

    @property
    def parts_ms(self) -> dict[Cause, float]:
        """Its own parts of a step, by what is slow where one of them is long."""
        steps = self.steps
        assert steps is not None, "only steps that are known are compared"
        alone_ms = steps.send_ms + steps.wait_ms - (self.peer_wait_ms or 0.0)
        return {
            Cause.STRAGGLER: steps.compute_ms,
            Cause.WAITING_FOR_DATA: steps.load_ms,
            Cause.SLOW_LINK: max(0.0, alone_ms),
        }

    @property
    def own_ms(self) -> float:
        """A step without what it waits for others."""
        return sum(self.parts_ms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What is known about a job.

    Attributes:
        phase: Its stage.
        mode: How workers keep together.
        waits_for_all: Whether all make their steps together.
        has_bound: Whether those that are ahead wait when they are too far.
        failure: Why it has failed.
        waits_for: Whom it waits for, in words; empty for nobody.
        shard_count: Shards that it has.
        missing_shards: Those whose process is not there.
        workers_min: Workers that its start waits for.
        ready_count: Those of them that have called prepare().
        disk_failure: Why the coordinator can't write its state.
        checkpoint_failure: Why the last checkpoint has failed.
        load_failure: Why the checkpoint of the start can't be loaded.
        clock: Clock that all members have completed.
        steps_per_s: Steps of all workers lately.
        apply_ms: How long the shard that is slowest applies a clock.
        epoch_batch_count: Batches of the newest epoch; None where none are leased.
        workers: Its members.
    """

    phase: JobPhase
    mode: str = "bsp"
    waits_for_all: bool = True
    has_bound: bool = False
    failure: str = ""
    waits_for: str = ""
    shard_count: int = 1
    missing_shards: tuple[int, ...] = ()
    workers_min: int = 1
    ready_count: int = 0
    disk_failure: str = ""
    checkpoint_failure: str = ""
    load_failure: str = ""
    clock: int = 0
    steps_per_s: float | None = None
    apply_ms: float = 0.0
    epoch_batch_count: int | None = None
    workers: tuple[WorkerFacts, ...] = ()


def facts_of(core: CoordinatorCore, now_ms: int) -> JobFacts:
    """What is known about a job now."""
    record, slots = core.record, core.shards.slots
    mode = core.settings.mode if record is None else record.mode
    members = core.roster.in_state(*PRESENT, WorkerState.LEAVING)
    needed = len(members) - core.settings.backup_worker_count
    if record is not None and mode.rules.has_quorum:
        needed = record.quorum
    joining = core.roster.in_state(WorkerState.JOINING)
    awaited = {each.name for slot in slots for each in slot.standing.waiting_for}
    return JobFacts(
        phase=core.phase,
        mode=mode.label,
        waits_for_all=mode.rules.is_clocked and needed >= len(members),
        has_bound=mode.rules.takes_bound,
        failure=core.progress.failure,
        waits_for=core.waiting_for(),
        shard_count=len(slots),
        missing_shards=tuple(slot.index for slot in core.shards.missing),
        workers_min=core.settings.workers_min,
        ready_count=sum(not entry.cut_off for entry in joining),
        disk_failure=core.writes.failure,
        checkpoint_failure=core.checkpoints.failure,
        load_failure=core.progress.load_failure,
        clock=min((slot.standing.frontier for slot in slots), default=0),
        steps_per_s=core.shards.steps_per_s,
        apply_ms=max(slot.apply_ms or 0.0 for slot in slots),
        epoch_batch_count=core.ledger.newest_batch_count,
        workers=tuple(_worker_facts(core, entry, awaited, now_ms) for entry in members),
    )


def _worker_facts(
    core: CoordinatorCore, entry: WorkerEntry, awaited: Collection[str], now_ms: int
) -> WorkerFacts:
    slots, newest = core.shards.slots, entry.work.newest
    name = entry.worker.worker_id
    is_lost = entry.state is WorkerState.LOST
    return WorkerFacts(
        name=name,
        lost_ms=max(1, now_ms - entry.heard_ms) if is_lost else 0,
        steps=entry.work.lately(),
        peer_wait_ms=core.shards.peer_wait_ms(entry.worker),
        activity=Activity.UNKNOWN if newest is None else newest.activity,
        activity_ms=0 if newest is None else newest.activity_ms,
        is_awaited=name in awaited,
        shares_memory=all(entry.worker in slot.standing.sharing for slot in slots),
        takes_local_steps=newest is not None and newest.round_step_count > 0,
    )


def diagnose(facts: JobFacts) -> Diagnosis:
    """What a job is doing, why it is slow or waits, and for whom."""
    if facts.phase is JobPhase.FAILED:
        return Diagnosis(Cause.FAILED, f"The job has failed: {facts.failure}")
    if facts.phase is JobPhase.FINISHED:
        return Diagnosis(
            Cause.FINISHED,
            f"The job is finished: all of its workers have left, after clock "
            f"{facts.clock}",
        )
    found = _of_disk(facts)
    if facts.phase is not JobPhase.RUNNING:
        return found or _of_start(facts)
    return (
        found
        or _of_losses(facts)
        or _of_checkpoints(facts)
        or _of_slow_one(facts)
        or _of_stuck_one(facts)
        or _of_all(facts)
        or _of_epochs(facts)
        or _training(facts)
    )


def _of_disk(facts: JobFacts) -> Diagnosis | None:
    """That a disk takes nothing: nobody can join or leave, or checkpoints fail."""
    if facts.disk_failure:
        return Diagnosis(
            Cause.DISK,
            "The coordinator's disk takes no changes, so that nobody can join or leave "
            f"until it does: {facts.disk_failure}",
        )
    if any(text in facts.checkpoint_failure for text in FULL_DISK_TEXTS):
        return Diagnosis(
            Cause.DISK,
            "The disk of the checkpoints is full or takes no writes: make room there; "
            "the job trains, and its last checkpoint has failed: "
            f"{facts.checkpoint_failure}",
        )
    return None


def _of_start(facts: JobFacts) -> Diagnosis:
    """What the start waits for."""
    lacking = facts.workers_min - facts.ready_count
    if facts.missing_shards:
        names = _shard_names(facts.missing_shards)
        return Diagnosis(
            Cause.STARTING,
            f"The job starts when {_listed(names)} of {facts.shard_count} "
            f"{_are(names)} there",
            names,
        )
    if facts.phase is JobPhase.WAITING and lacking > 0:
        return Diagnosis(
            Cause.TOO_FEW_WORKERS,
            f"The job waits for {lacking} more worker{'s' if lacking > 1 else ''}: "
            f"{facts.ready_count} of {facts.workers_min} "
            f"{'has' if facts.ready_count == 1 else 'have'} called prepare(); start "
            "what is missing, or the job with a smaller --min-workers",
        )
    if facts.load_failure:
        return Diagnosis(
            Cause.STARTING, f"The job starts when it can load: {facts.load_failure}"
        )
    what = facts.waits_for or "the coordinator to write its first record"
    return Diagnosis(Cause.STARTING, f"The job starts: it waits for {what}")


def _of_losses(facts: JobFacts) -> Diagnosis | None:
    if facts.missing_shards:
        return Diagnosis(
            Cause.SHARD_LOST,
            f"Nothing is trained: the job waits for {facts.waits_for}",
            _shard_names(facts.missing_shards),
        )
    lost = tuple(each.name for each in facts.workers if each.lost_ms)
    if not facts.workers or len(lost) == len(facts.workers):
        what = facts.waits_for or "a worker to go on"
        return Diagnosis(
            Cause.WORKER_LOST if lost else Cause.TOO_FEW_WORKERS,
            f"No worker is left: the job waits for {what}",
            lost,
        )
    if lost:
        lost_s = max(each.lost_ms for each in facts.workers) / 1000
        verb = "holds" if len(lost) == 1 else "hold"
        held = (
            f"{verb} up the others until that is settled"
            if facts.waits_for_all
            else f"the others go on in {facts.mode}"
        )
        return Diagnosis(
            Cause.WORKER_LOST,
            f"{_listed(lost)} {_are(lost)} lost, without a sign of life for "
            f"{lost_s:.0f} s, and {held}"
            + (f": the job waits for {facts.waits_for}" if facts.waits_for else ""),
            lost,
            others_wait=facts.waits_for_all,
        )
    if facts.waits_for:
        return Diagnosis(Cause.SLOW_LINK, f"The job waits for {facts.waits_for}")
    return None


def _of_checkpoints(facts: JobFacts) -> Diagnosis | None:
    if not facts.checkpoint_failure:
        return None
    return Diagnosis(
        Cause.CHECKPOINT_FAILING,
        f"The job trains, and its last checkpoint has failed: "
        f"{facts.checkpoint_failure}",
    )


def _of_slow_one(facts: JobFacts) -> Diagnosis | None:
    """Workers whose own part of a step is much longer than that of the others."""
    known = [each for each in facts.workers if each.steps is not None]
    if len(known) < 2:
        return None
    worst = max(known, key=lambda each: each.own_ms)
    others = [each for each in known if each is not worst]
    usual_ms = median(each.own_ms for each in others)
    if not _is_slower(worst, usual_ms):
        return None
    slow = [each for each in known if _is_slower(each, usual_ms)]
    usual = [each for each in known if each not in slow]
    parts = worst.parts_ms
    usual_parts = {
        cause: median(each.parts_ms[cause] for each in usual) for cause in parts
    }
    cause = max(parts, key=lambda each: parts[each] - usual_parts[each])
    slow.sort(key=lambda each: -each.own_ms)
    names = tuple(each.name for each in slow)
    follows = f"go on without {names[0]} in {facts.mode}"
    is_waited_for = facts.waits_for_all or facts.has_bound
    if is_waited_for:
        follows = f"wait for {names[0]}" + (" at the staleness bound" * facts.has_bound)
    own, step = _time(parts[cause]), _time(worst.own_ms)
    theirs = _time(usual_parts[cause])
    text = {
        Cause.STRAGGLER: (
            f"{names[0]} is the straggler: its {worst.unit} takes {step}, of which it "
            f"computes {own}; the others compute {theirs} and {follows}"
        ),
        Cause.WAITING_FOR_DATA: (
            f"{names[0]} waits for its loader: {own} of its {worst.unit} of {step}; "
            f"the others wait {theirs} for theirs, and {follows}"
        ),
        Cause.SLOW_LINK: (
            f"{names[0]} has a slow link: its {worst.unit} takes {step}, of which "
            f"{own} to send gradients and receive values; the others take {theirs} and "
            f"{follows}"
        ),
    }[cause]
    if len(names) > 1:
        text += f"; {_listed(names[1:])} {_are(names[1:])} slow too"
    more = OTHER_MODE * (cause is Cause.STRAGGLER and is_waited_for)
    return Diagnosis(
        cause, f"{text}; {worst.cure(cause)}{more}", names, others_wait=is_waited_for
    )


def _is_slower(worker: WorkerFacts, usual_ms: float) -> bool:
    return (
        worker.own_ms >= SLOWER_FACTOR * usual_ms
        and worker.own_ms - usual_ms >= SLOWER_MS_MIN
    )


def _of_stuck_one(facts: JobFacts) -> Diagnosis | None:
    """Workers that shards have waited for for seconds, while others are done."""
    awaited = [each for each in facts.workers if each.is_awaited]
    if not awaited or len(awaited) == len(facts.workers):
        return None
    longest = max(awaited, key=lambda each: each.activity_ms)
    cause, what = {
        Activity.LOADING: (Cause.WAITING_FOR_DATA, "has waited for its loader"),
        Activity.SENDING: (Cause.SLOW_LINK, "has sent its gradient"),
        Activity.WAITING: (Cause.SLOW_LINK, "has waited for answers of the shards"),
    }.get(longest.activity, (Cause.STRAGGLER, "has computed"))
    since = f"for {_time(longest.activity_ms)}" if longest.activity_ms else "for long"
    title = " is the straggler: it" if cause is Cause.STRAGGLER else ""
    return Diagnosis(
        cause,
        f"{longest.name}{title} {what} {since}, and the others wait for it",
        tuple(each.name for each in awaited),
        others_wait=True,
    )


def _of_all(facts: JobFacts) -> Diagnosis | None:
    """What makes the steps of all workers slow."""
    known = [each for each in facts.workers if each.steps is not None]
    if not known:
        return None
    step_ms = median(each.own_ms for each in known)
    load_ms = median(each.parts_ms[Cause.WAITING_FOR_DATA] for each in known)
    if load_ms >= max(SHARE_MIN * step_ms, SLOWER_MS_MIN):
        who = (
            f"{known[0].name} waits for its loader"
            if len(known) == 1
            else "The workers wait for their loaders"
        )
        return Diagnosis(
            Cause.WAITING_FOR_DATA,
            f"{who}: {_time(load_ms)} of a {known[0].unit} of {_time(step_ms)}; "
            f"{CURES[Cause.WAITING_FOR_DATA]}",
            tuple(each.name for each in known),
        )
    remote = [each for each in known if not each.shares_memory]
    if not remote:
        return None
    wire_ms = median(each.parts_ms[Cause.SLOW_LINK] for each in remote) - facts.apply_ms
    step_bytes = median(_bytes(each.steps) for each in remote)
    is_slow = step_bytes < LINK_BYTES_PER_S_MAX * wire_ms / 1000
    if is_slow and wire_ms >= max(SHARE_MIN * step_ms, LINK_MS_MIN):
        return Diagnosis(
            Cause.SLOW_LINK,
            f"The link between workers and shards is slow: {_time(wire_ms)} of a "
            f"{remote[0].unit} of {_time(step_ms)} goes to sending gradients and "
            f"receiving values; {remote[0].cure(Cause.SLOW_LINK)}",
            tuple(each.name for each in remote),
        )
    return None


def _of_epochs(facts: JobFacts) -> Diagnosis | None:
    """That most of the time goes to where epochs end and begin.

    There workers ask the coordinator for data and wait until the others are done, which
    no loader makes faster.
    """
    known = [each.steps for each in facts.workers if each.steps is not None]
    if not known or facts.epoch_batch_count is None:
        return None
    step_count = facts.epoch_batch_count / len(facts.workers)
    idle_ms = median(each.idle_ms for each in known)
    step_ms = median(each.step_ms for each in known) + idle_ms
    if step_count > SHORT_EPOCH_STEPS_MAX or (
        idle_ms < max(SHARE_MIN * step_ms, SLOWER_MS_MIN)
    ):
        return None
    return Diagnosis(
        Cause.SHORT_EPOCHS,
        f"Epochs are short, {step_count:.3g} step{'s' * (step_count != 1)} of each "
        f"worker, and {_time(idle_ms)} of {_time(step_ms)} for a step go to where they "
        f"end and begin; {CURES[Cause.SHORT_EPOCHS]}",
    )


def _bytes(steps: StepMeans | None) -> float:
    return 0.0 if steps is None else steps.bytes_per_step


def _training(facts: JobFacts) -> Diagnosis:
    count = len(facts.workers)
    workers = f"{count} worker{'s' if count > 1 else ''}"
    rate = facts.steps_per_s
    speed = "" if rate is None else f", {_rate(rate)} steps/s"
    return Diagnosis(
        Cause.TRAINING,
        f"Training at clock {facts.clock} in {facts.mode} with {workers}{speed}",
    )


def _rate(per_s: float) -> str:
    return f"{per_s:.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _time(ms: float) -> str:
    if ms >= 1000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def _shard_names(indexes: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"shard {index}" for index in indexes)


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:NAME_COUNT_MAX])
    if len(names) > NAME_COUNT_MAX:
        shown.append(f"{len(names) - NAME_COUNT_MAX} more")
    if len(shown) == 1:
        return shown[0]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"
