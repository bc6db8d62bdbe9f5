"""What one shard did, replayed line by line and checked on the way.

A shard's lines are in the order in which it did things, so that "before" can be
checked here; what shards have to agree on is `job_check`'s.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from psctl.history.findings import Findings
from psctl.history.lines import Line, Push, Worker, push_of
from psctl.history.merges import Merges, Sent

APPLIED = "applied"
SKIPPED = "skipped"
DROPPED = "dropped"
DUPLICATE = "duplicate"

_NEVER: Final = 1 << 62
"""A clock that no worker reaches."""


class Member(NamedTuple):
    """A member of a record; its push `base_sequence + n` is of `base_clock + n`."""

    worker: Worker
    base_clock: int
    base_sequence: int

    def clock_of(self, sequence: int) -> int:
        return self.base_clock + sequence - self.base_sequence


@dataclass(slots=True)
class PushOnShard:
    """What one shard did with one push.

    Attributes:
        chunks: Chunks that are part of it here, None before its trailer.
        applied: Line that applied each chunk.
        left_out: Chunks that were applied without it, since it is not finite there.
        outcome: Empty while open.
        done: Line that ended it.
    """

    chunks: frozenset[int] | None = None
    applied: dict[int, Line] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    outcome: str = ""
    done: Line | None = None


class ShardStory:
    """One start of one shard.

    Attributes:
        place: First line of its history.
        is_two_phase: Whether it applies a push only when every shard has it.
        pushes: What it did with each push.
        last_sequences: Of departed workers, the last push that counts.
        torn_reported: Torn steps that the shard itself has counted.
        merges: On shard 0, clocks that it has closed by a quorum.
        merged: Of each clock, the pushes that were applied as part of it.
    """

    def __init__(self, begin: Line, findings: Findings) -> None:
        self.index = begin.number_of("shard")
        self.is_two_phase = begin.values.get("atomicity") == "clock"
        self.place = begin.place
        self.pushes: dict[Push, PushOnShard] = {}
        self.last_sequences: dict[Worker, int] = {}
        self.torn_reported = 0
        self.merged: dict[int, set[Push]] = {}
        self._findings = findings
        self._generation = 0
        self._members: dict[Worker, Member] = {}
        self._leavers: dict[Worker, tuple[Member, int]] = {}
        self._done_sequences: dict[Worker, int] = {}
        self._chunk_sequences: dict[tuple[Worker, int], int] = {}
        self._newest = Newest()
        self.merges = Merges()
        self._sent: dict[Push, Sent] = {}

    @property
    def name(self) -> str:
        return f"shard {self.index}"

    def take(self, line: Line) -> None:
        """Replays one line."""
        match line.kind:
            case "trailer":
                chunks = frozenset(int(chunk) for chunk in line.values["chunks"])
                # A push that counts for nothing changes nothing.
                is_counted = line.values["weight"] != 0
                self._push(line.push()).chunks = chunks if is_counted else frozenset()
                slack_ms = line.values.get("slack_ms")
                self._sent[line.push()] = Sent(line.values["weight"], slack_ms)
            case "merge":
                workers = {*self._members, *self._leavers}
                self.merges.take(line, self._sent, len(workers), self._findings)
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
            if state.applied and self.is_torn(push)
        ]

    def is_torn(self, push: Push) -> bool:
        """Whether it is beyond its worker's last push, so that it can be torn."""
        return push.sequence > self.last_sequences.get(push.worker, push.sequence)

    def _push(self, push: Push) -> PushOnShard:
        return self.pushes.setdefault(push, PushOnShard())

    def _require(self, promise: str, kept: bool, line: Line, text: str) -> None:
        self._findings.require(promise, kept, line.place, f"{self.name} {text}")

    def _apply(self, line: Line) -> None:
        chunk = line.number_of("chunk")
        clock = line.number_of("clock", 0)
        self.merged.setdefault(clock, set()).update(line.pushes("pushes"))
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
            said = f"applied chunk {chunk} of {push}"
            self._require("G1", not problem, line, f"{said} {problem}")
            state.applied.setdefault(chunk, line)
            key = (push.worker, chunk)
            newest = self._chunk_sequences.get(key, 0)
            self._require(
                "G4", push.sequence >= newest, line, f"{said} after push {newest}"
            )
            self._chunk_sequences[key] = max(newest, push.sequence)

    def _finish(self, line: Line) -> None:
        push = line.push()
        outcome = line.text_of("outcome")
        state = self._push(push)
        if state.done is not None:
            self._findings.broken(
                "G1",
                line.place,
                f"{self.name} ended {push} a second time, after line "
                f"{state.done.number}",
            )
            return
        state.outcome, state.done = outcome, line
        newest = self._done_sequences.get(push.worker, 0)
        self._require(
            "G4", push.sequence > newest, line, f"ended {push} after push {newest}"
        )
        self._done_sequences[push.worker] = max(newest, push.sequence)
        said = f"ended {push} as {outcome}"
        if outcome == APPLIED:
            wanted = (state.chunks or frozenset()) - state.left_out
            missing = wanted - state.applied.keys()
            how = f"chunk {min(missing)}" if missing else "having all of it"
            is_whole = state.chunks is not None and not missing
            self._require("G1", is_whole, line, f"{said} without {how}")
        else:
            count = len(state.applied)
            self._require(
                "G1", not count, line, f"{said} with {count} of its chunks applied"
            )

    def _reply(self, line: Line) -> None:
        self._newest.check(
            line, self._findings, lambda what: f"{self.name} answered with {what}"
        )
        if line.values.get("outcome") == DROPPED:
            return
        clock, bound = line.number_of("clock"), bound_of(line)
        frontier = line.number_of("frontier")
        if bound is None:
            return
        self._require(
            "G6",
            frontier >= clock - bound,
            line,
            f"answered clock {clock} at frontier {frontier}, with a bound of {bound}",
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
        said = f"answered as of clock {clock} "
        if late:
            said += f"with only clock {late[0][1]} of {late[0][0]} applied"
        self._require("G6", not late, line, said)

    def _progress(self, line: Line) -> list[tuple[Worker, int, int]]:
        """Of each worker that counts: its newest clock here, and its last one."""
        found = [
            (worker, self._clock_of(member), _NEVER)
            for worker, member in self._members.items()
        ]
        # Pushes of a departed worker hold up a clock of BSP, and no other frontier.
        if line.values.get("mode") in ("bsp", "quorum"):
            found += [
                (worker, self._clock_of(member), member.clock_of(last))
                for worker, (member, last) in self._leavers.items()
            ]
        return found

    def _clock_of(self, member: Member) -> int:
        return member.clock_of(self._done_sequences.get(member.worker, 0))

    def _install(self, line: Line) -> None:
        generation = line.number_of("generation")
        self._require(
            "G4",
            generation > self._generation,
            line,
            f"went from generation {self._generation} to {generation}",
        )
        self._generation = max(self._generation, generation)
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
        self.merges.note_record(line)


class Newest:
    """The newest version and frontier of one shard's replies, which never go back."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, str]] = {}

    def check(
        self, reply: Line, findings: Findings, said: Callable[[str], str]
    ) -> None:
        """Compares a reply with those before it; `said` is the sentence if it did."""
        for name in ("version", "frontier"):
            value = reply.number_of(name)
            before, place = self._newest.get(name, (0, "the start"))
            text = f"{said(f'{name} {value}')} after {before} at {place}"
            findings.require("G4", value >= before, reply.place, text)
            self._newest[name] = max((before, place), (value, reply.place))


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
