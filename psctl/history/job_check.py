"""Whether all processes of a job together kept its promises."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from psctl.history.findings import Findings
from psctl.history.lines import Line, Push, Start, Worker
from psctl.history.lives import lives_of
from psctl.history.shard_story import (
    APPLIED,
    DROPPED,
    DUPLICATE,
    PushOnShard,
    ShardStory,
    members_of,
)
from psctl.history.worker_story import EVICTED, PushOfWorker, WorkerStory
from psctl.tables import count_text
from pswire.limits import SHARD_COUNT_MAX

_SENSELESS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""What comes of a line whose values are not what they should be."""


@dataclass(slots=True)
class Job:
    """Everything that is known of one life of a job.

    Attributes:
        job_ids: Its name, and others that should not be there.
        shard_count: Shards that it has, 0 when no file says so.
        shards: By index.
        workers: All starts of all workers.
        records: Lines of each record, as the coordinator and shards have it.
    """

    job_ids: dict[str, str] = field(default_factory=dict)
    shard_count: int = 0
    shards: dict[int, ShardStory] = field(default_factory=dict)
    workers: list[WorkerStory] = field(default_factory=list)
    pushes: dict[Push, PushOfWorker] = field(default_factory=dict)
    records: dict[int, list[Line]] = field(default_factory=dict)
    evicted: set[Worker] = field(default_factory=set)

    @property
    def is_finished(self) -> bool:
        """Whether the newest record has nobody left, so that nothing may be open."""
        if not self.records:
            return False
        newest = self.records[max(self.records)][0]
        return not newest.values["members"]


def check_job(starts: Sequence[Start], findings: Findings) -> list[str]:
    """Replays all histories, and checks what they say together in each life.

    Returns:
        Names of the jobs that they are of, which should be one.
    """
    try:
        lives = lives_of(starts)
    except _SENSELESS:
        lives = [list(starts)]  # the replay says which line is not understood
    jobs = [_check_life(life, findings) for life in lives]
    places: dict[str, str] = {}
    for job in jobs:
        places = {**job.job_ids, **places}
    findings.require(
        "files",
        len(places) == 1,
        next(iter(places.values()), "-"),
        f"these are histories of {len(places)} jobs: {', '.join(places)}",
    )
    _count(jobs, findings)
    return list(places)


def _check_life(starts: Sequence[Start], findings: Findings) -> Job:
    job = Job()
    for start in starts:
        with_story(job, start, findings)
    _check_whole(job, findings)
    for generation, lines in sorted(job.records.items()):
        _check_same(generation, lines, findings)
    _check_acknowledged(job, findings)
    _check_all_or_nothing(job, findings)
    _check_merged(job, findings)
    for shard in job.shards.values():
        _check_torn(shard, findings)
    return job


def with_story(job: Job, start: Start, findings: Findings) -> None:
    """Replays one start of one process into the job."""
    line = start.begin
    try:
        job.job_ids.setdefault(line.text_of("job"), line.place)
        story: ShardStory | WorkerStory | None = None
        match start.role:
            case "shard":
                job.shard_count = _shard_count(line)
                story = ShardStory(line, findings)
                older = job.shards.get(story.index)
                findings.require(
                    "files",
                    older is None,
                    line.place,
                    f"{story.name} has two histories, the other at "
                    f"{older.place if older else ''}",
                )
                job.shards[story.index] = story
            case "worker":
                story = WorkerStory(line, findings, job.pushes)
                job.workers.append(story)
            case "coordinator":
                job.shard_count = _shard_count(line)
        for each in start.lines:
            line = each
            if line.kind == "record":
                _note_record(job, line)
            if story is not None:
                story.take(line)
    except _SENSELESS as error:
        findings.broken("files", line.place, f"this line is not understood: {error!r}")


def _shard_count(begin: Line) -> int:
    count = begin.number_of("shard_count")
    if not 1 <= count <= SHARD_COUNT_MAX:
        raise ValueError(f"no job has {count} shards")
    return count


def _note_record(job: Job, line: Line) -> None:
    members_of(line.values["members"])
    job.records.setdefault(line.number_of("generation"), []).append(line)
    for worker_id, incarnation, _, evicted in line.values["departures"]:
        if evicted:
            job.evicted.add(Worker(worker_id, incarnation))


def _check_whole(job: Job, findings: Findings) -> None:
    first = next(iter(job.job_ids.values()), "-")
    for index in range(job.shard_count):
        findings.require(
            "files",
            index in job.shards,
            first,
            f"the history of shard {index} is missing: what it applied is unknown",
        )


def _check_same(generation: int, lines: Iterable[Line], findings: Findings) -> None:
    """A record is the same wherever it is."""
    first, *others = lines
    for line in others:
        for name in ("members", "departures", "mode", "bound", "mode_clock", "skipped"):
            findings.require(
                "files",
                line.values.get(name) == first.values.get(name),
                line.place,
                f"generation {generation} has other {name} than at {first.place}",
            )


def _check_acknowledged(job: Job, findings: Findings) -> None:
    """The outcome that a worker received is what every shard did with the push."""
    for push, sent in job.pushes.items():
        if not sent.is_acknowledged:
            continue
        assert sent.ended is not None
        if sent.outcome == EVICTED:
            _check_evicted(push, sent.ended.place, job, findings)
            continue
        wanted = APPLIED if sent.outcome == DUPLICATE else sent.outcome
        for shard in job.shards.values():
            state = shard.pushes.get(push, PushOnShard())
            # A push whose first answer was lost may have been skipped or dropped.
            kept = state.outcome == wanted or (
                sent.outcome == DUPLICATE and bool(state.outcome)
            )
            kept = kept and not shard.is_torn(push)
            found = state.outcome or "not done"
            if shard.is_torn(push):
                found += f", beyond push {shard.last_sequences[push.worker]}, its last"
            if not kept and wanted == APPLIED:
                findings.counts["lost"] += 1
            findings.require(
                "G1",
                kept,
                sent.ended.place,
                f"{push} was acknowledged as {sent.outcome}, and on {shard.name} it is "
                f"{found}",
            )


def _check_merged(job: Job, findings: Findings) -> None:
    """A clock that was closed by a quorum has the same pushes on every shard.

    Shard 0 says which; fewer where some are not finite, or rejected.
    """
    for shard in job.shards.values() if 0 in job.shards else ():
        for clock, wanted in job.shards[0].merges.pushes.items():
            others = shard.merged.get(clock, set()) - wanted
            findings.require(
                "G40",
                not others,
                shard.place,
                f"{shard.name} applied {min(others, default=None)} in clock {clock}, "
                "which was closed without it",
            )


def _check_evicted(push: Push, place: str, job: Job, findings: Findings) -> None:
    """A push that was dropped with its start counts on no shard."""
    for shard in job.shards.values():
        outcome = shard.pushes.get(push, PushOnShard()).outcome
        findings.require(
            "G1",
            shard.is_torn(push) or outcome in ("", DROPPED),
            place,
            f"{push} was thrown away when its worker was evicted, and on {shard.name} "
            f"it is {outcome}",
        )


def _check_all_or_nothing(job: Job, findings: Findings) -> None:
    """What is done on one shard is done on all, but for what is under way."""
    acknowledged = {p for p, sent in job.pushes.items() if sent.is_acknowledged}
    seen = {push for shard in job.shards.values() for push in shard.pushes}
    for push in sorted(seen):
        shards = job.shards.values()
        if any(shard.is_torn(push) for shard in shards):
            continue  # of these only a part may be there, which is counted
        states = [(shard, shard.pushes.get(push, PushOnShard())) for shard in shards]
        ends = {state.outcome for _, state in states if state.outcome}
        # Under way when the histories end: nobody was promised anything yet.
        is_open = not job.is_finished and push not in acknowledged
        text = ", ".join(
            f"{state.outcome or 'not done'} on {shard.name}" for shard, state in states
        )
        has_begun = bool(ends) or any(state.applied for _, state in states)
        is_whole = not has_begun or all(state.outcome for _, state in states)
        place = next((s.done.place for _, s in states if s.done), states[0][0].place)
        findings.require(
            "G3", len(ends) <= 1 and (is_whole or is_open), place, f"{push} is {text}"
        )


def _check_torn(shard: ShardStory, findings: Findings) -> None:
    torn = shard.torn_pushes()
    said = f"{shard.name} has {count_text(len(torn), 'torn push', 'torn pushes')}"
    findings.counts["torn"] += len(torn)
    findings.require(
        "G3",
        not (torn and shard.is_two_phase),
        shard.place,
        f"{said} although steps are two-phase: {', '.join(map(str, torn[:5]))}",
    )
    findings.require(
        "G3",
        len(torn) <= shard.torn_reported,
        shard.place,
        f"{said} and reported {shard.torn_reported}: {', '.join(map(str, torn[:5]))}",
    )


def _count(jobs: Sequence[Job], findings: Findings) -> None:
    """Numbers of the whole job, of all of its lives together."""
    counts = findings.counts
    workers = [story.worker for job in jobs for story in job.workers]
    counts["lives"] = len(jobs)
    counts["workers"] = len({worker.worker_id for worker in workers})
    counts["worker_starts"] = len(set(workers))
    counts["shards"] = len({index for job in jobs for index in job.shards})
    counts["generations"] = sum(len(job.records) for job in jobs)
    counts["evicted"] = sum(len(job.evicted) for job in jobs)
    for name in ("lost", "applied_twice", "torn"):
        counts.setdefault(name, 0)
    for job in jobs:
        for push, sent in job.pushes.items():
            counts["pushes"] += 1
            counts[_counted_as(push, sent, job)] += 1


def _counted_as(push: Push, sent: PushOfWorker, job: Job) -> str:
    if sent.is_acknowledged:
        return "dropped" if sent.outcome in (DROPPED, EVICTED) else "acknowledged"
    outcomes = [shard.pushes.get(push) for shard in job.shards.values()]
    is_applied = any(state and state.outcome == APPLIED for state in outcomes)
    return "unknown_applied" if is_applied else "unknown_not_applied"
