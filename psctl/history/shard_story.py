"""What one shard did, replayed line by line and checked on the way.

A shard's lines are in the order in which it did things, so that "before" can be
checked here; what shards have to agree on is `job_check`'s.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from psctl.history.findings import Findings
from psctl.history.lines import Line, Push, Worker, push_of

APPLIED = "applied"
SKIPPED = "skipped"
DROPPED = "dropped"
DUPLICATE = "duplicate"

_NEVER: Final = 1 << 62
"""A clock that nobody reaches."""


class Member(NamedTuple):
    """A member of a record; its push `base_sequence + n` is of `base_clock + n`."""

    worker: Worker
    base_clock: int
    base_sequence: int

    def clock_of(self, sequence: int) -> int:
        """Clock that a push completes."""
        return self.base_clock + sequence - self.base_sequence


@dataclass(slots=True)
class PushOnShard:
    """What one shard did with one push.

    Attributes:
        chunks: Chunks that are part of it here, None before its trailer.
        applied: Line that applied each chunk.
        left_out: Chunks that were applied without it, since it is not finite there.
        outcome: What became of it, empty while open.
        done: Line that says so.
    """

    chunks: frozenset[int] | None = None
    applied: dict[int, Line] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    outcome: str = ""
    done: Line | None = None


class ShardStory:
    """One start of one shard.

    Attributes:
        index: Its place.
        is_two_phase: Whether it applies a push only when every shard has it.
        place: First line of its history.
        pushes: What it did with each push.
        last_sequences: Of workers that records took out, the last push that counts.
        torn_reported: Torn steps that the shard itself has counted.
        records: Line of each record by generation.
    """

    def __init__(self, begin: Line, findings: Findings) -> None:
        self.index = begin.number_of("shard")
        self.incarnation = begin.number_of("incarnation")
        self.is_two_phase = begin.values.get("atomicity") == "clock"
        self.place = begin.place
        self.pushes: dict[Push, PushOnShard] = {}
        self.last_sequences: dict[Worker, int] = {}
        self.torn_reported = 0
        self.records: dict[int, Line] = {}
        self._findings = findings
        self._members: dict[Worker, Member] = {}
        self._leavers: dict[Worker, tuple[Member, int]] = {}
        self._done_sequences: dict[Worker, int] = {}
        self._chunk_sequences: dict[tuple[Worker, int], int] = {}
        self._version = (0, "")
        self._frontier = (0, "")

    @property
    def name(self) -> str:
        """For a person."""
        return f"shard {self.index}"

    def take(self, line: Line) -> None:
        """Replays one line."""
        match line.kind:
            case "trailer":
                chunks = frozenset(int(chunk) for chunk in line.values["chunks"])
                # A push that counts for nothing changes nothing.
                is_counted = line.values["weight"] != 0
                self._push(line.push()).chunks = chunks if is_counted else frozenset()
            case "applied":
                self._apply(line)
            case "done":
                self._finish(line)
            case "reply":
                self._reply(line)
            case "record":
                self._install(line)

    def torn_pushes(self) -> list[Push]:
        """Pushes beyond their worker's last one of which something is applied."""
        return [
            push
            for push, state in self.pushes.items()
            if state.applied
            and push.sequence > self.last_sequences.get(push.worker, push.sequence)
        ]

    def is_torn(self, push: Push) -> bool:
        """Whether the push came after its worker's last one, so that it can be torn."""
        return push.sequence > self.last_sequences.get(push.worker, push.sequence)

    # Inside

    def _push(self, push: Push) -> PushOnShard:
        return self.pushes.setdefault(push, PushOnShard())

    def _apply(self, line: Line) -> None:
        chunk = line.number_of("chunk")
        for push in line.pushes("torn"):
            self._push(push).left_out.add(chunk)
        for push in line.pushes("pushes"):
            state = self._push(push)
            first = state.applied.get(chunk)
            problem = ""
            if first is not None:
                self._findings.counts["applied_twice"] += 1
                problem = f"a second time, after line {first.number}"
            elif state.done is not None:
                problem = f"after it was done in line {state.done.number}"
            elif self.is_torn(push):
                problem = "although its worker had been evicted before it"
            self._findings.require(
                "G1",
                not problem,
                line.place,
                f"{self.name} applied chunk {chunk} of {push} {problem}",
            )
            state.applied.setdefault(chunk, line)
            key = (push.worker, chunk)
            newest = self._chunk_sequences.get(key, 0)
            self._findings.require(
                "G4",
                push.sequence >= newest,
                line.place,
                f"{self.name} applied chunk {chunk} of {push} after push {newest}",
            )
            self._chunk_sequences[key] = max(newest, push.sequence)

    def _finish(self, line: Line) -> None:
        push = line.push()
        outcome = line.text_of("outcome")
        state = self._push(push)
        place = line.place
        if state.done is not None:
            self._findings.broken(
                "G1",
                place,
                f"{self.name} ended {push} a second time, after line "
                f"{state.done.number}",
            )
            return
        state.outcome, state.done = outcome, line
        newest = self._done_sequences.get(push.worker, 0)
        self._findings.require(
            "G4",
            push.sequence > newest,
            place,
            f"{self.name} ended {push} after push {newest}",
        )
        self._done_sequences[push.worker] = max(newest, push.sequence)
        if outcome == APPLIED:
            wanted = (state.chunks or frozenset()) - state.left_out
            missing = wanted - state.applied.keys()
            self._findings.require(
                "G1",
                state.chunks is not None and not missing,
                place,
                f"{self.name} ended {push} as applied "
                + (
                    f"without chunk {min(missing)}"
                    if missing
                    else "without having all of it"
                ),
            )
        else:
            self._findings.require(
                "G1",
                not state.applied,
                place,
                f"{self.name} ended {push} as {outcome} with {len(state.applied)} of "
                "its chunks applied",
            )

    def _reply(self, line: Line) -> None:
        version, frontier = line.number_of("version"), line.number_of("frontier")
        for name, value, before in (
            ("version", version, self._version),
            ("frontier", frontier, self._frontier),
        ):
            self._findings.require(
                "G4",
                value >= before[0],
                line.place,
                f"{self.name} answered with {name} {value} after {before[0]} at "
                f"{before[1]}",
            )
        self._version = max(self._version, (version, line.place))
        self._frontier = max(self._frontier, (frontier, line.place))
        if line.values.get("outcome") == DROPPED:
            return
        clock, bound = line.number_of("clock"), bound_of(line)
        if bound is None:
            return
        self._findings.require(
            "G6",
            frontier >= clock - bound,
            line.place,
            f"{self.name} answered clock {clock} at frontier {frontier}, with a bound "
            f"of {bound}",
        )
        self._check_applied(line, clock - bound)
        self._check_applied(line, frontier)

    def _check_applied(self, line: Line, clock: int) -> None:
        """Everything of every member up to a clock was applied before this answer."""
        late = [
            (worker, done)
            for worker, done, last in self._progress(line)
            if done < min(clock, last)
        ]
        said = f"{self.name} answered as of clock {clock} "
        if late:
            said += f"with only clock {late[0][1]} of {late[0][0]} applied"
        self._findings.require("G6", not late, line.place, said)

    def _progress(self, line: Line) -> list[tuple[Worker, int, int]]:
        """Of each worker that counts: its newest clock here, and its last one."""
        found = [
            (worker, self._clock_of(member), _NEVER)
            for worker, member in self._members.items()
        ]
        # Pushes of one that is gone hold up a clock of BSP, and no other frontier.
        if line.values.get("mode") == "bsp":
            found += [
                (worker, self._clock_of(member), member.clock_of(last))
                for worker, (member, last) in self._leavers.items()
            ]
        return found

    def _clock_of(self, member: Member) -> int:
        done = self._done_sequences.get(member.worker, 0)
        return member.clock_of(done)

    def _install(self, line: Line) -> None:
        generation = line.number_of("generation")
        newest = max(self.records, default=0)
        self._findings.require(
            "G4",
            generation > newest,
            line.place,
            f"{self.name} went from generation {newest} to {generation}",
        )
        self.records[generation] = line
        before = self._members
        self._members = {
            member.worker: member for member in members_of(line.values["members"])
        }
        for values in line.values["departures"]:
            worker, last = push_of(values[:3])
            self.last_sequences.setdefault(worker, last)
            if worker in before:
                self._leavers[worker] = (before[worker], last)
        self.torn_reported = line.number_of("torn", self.torn_reported)


def members_of(values: object) -> list[Member]:
    """Members from `[id, incarnation, base_clock, base_sequence]` each."""
    if not isinstance(values, list):
        raise TypeError("`members` is no list")
    found = []
    for worker_id, incarnation, base_clock, base_sequence in values:
        push = push_of([worker_id, incarnation, base_sequence])
        found.append(Member(push.worker, int(base_clock), push.sequence))
    return found


def bound_of(line: Line) -> int | None:
    """The staleness bound under which an answer was given, None for no bound.

    Not asked of `Mode.rules`, by which the shards answer: a rule that is wrong there is
    to be noticed here.
    """
    mode = line.text_of("mode")
    if mode == "asp":
        return None
    return line.number_of("bound") if mode == "ssp" else 0
