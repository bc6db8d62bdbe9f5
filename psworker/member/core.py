"""What one start of a worker decides in the protocol: a state machine, without calls.

Records, answers of shards and failed calls come in; what to send or pull next is
returned. The drivers make the calls and keep the time: in a process the event loop and
the user's thread, in tests the drawn schedules. Source: docs/decisions/0014.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pswire.membership import Member, Mode, Record, WorkerKey
from pswire.outcome import Outcome
from psworker.errors import EvictedError, StalenessError
from psworker.member.open_push import OpenPush
from psworker.optim.push_result import PushResult, combine, worst_outcome
from psworker.transport.values import PushHeader, PushReply

_BUG: Final = (
    "this should be impossible: either it is a bug, please report it with the logs of "
    "all processes, or a proxy mixes the connections of several jobs"
)


@dataclass(frozen=True, slots=True)
class Evicted:
    """The newest record ends this worker's membership.

    Attributes:
        last_clock: Its last clock that counts, None if the record does not say.
    """

    last_clock: int | None


@dataclass(frozen=True, slots=True)
class Pull:
    """Pull all values from all shards.

    Attributes:
        generation: Of the record that the clock is counted by.
        clock: The worker's clock.
    """

    generation: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPush:
    """Where a push belongs. It keeps its place, however often it is sent.

    Attributes:
        generation: Of the record that the clock is counted by.
        sequence: Number of the push.
        clock: Clock that it completes.
        sequence_unacknowledged_min: Lowest push that is not settled.
        is_of_longest: Whether its worker is the longest member.
    """

    generation: int
    sequence: int
    clock: int
    sequence_unacknowledged_min: int
    is_of_longest: bool

    def header(
        self, job_id: str, worker: WorkerKey, optimizer: str, value_entries: bytes = b""
    ) -> PushHeader:
        """The header of this push, of one optimizer."""
        return PushHeader(
            job_id=job_id,
            optimizer=optimizer,
            worker=worker,
            generation=self.generation,
            sequence=self.sequence,
            sequence_unacknowledged_min=self.sequence_unacknowledged_min,
            clock=self.clock,
            value_entries=value_entries,
        )


@dataclass(frozen=True, slots=True)
class Settled:
    """All shards have answered a push alike: what became of it."""

    result: PushResult


@dataclass(frozen=True, slots=True)
class Missed:
    """A push was dropped: the job has closed clocks without this worker.

    Attributes:
        generation: Of the oldest record that says what these clocks are.
        sequence: Push up to which all are settled.
    """

    generation: int
    sequence: int


class MemberCore:
    """One start of a worker, from its first record to its eviction.

    Attributes:
        worker: Which start of which worker.
        clip_grad_norm: Norm that the job clips gradients to, 0 for no clipping.
        record: Newest record, None before the start.
        sequence: Last push that is settled on every shard.
        generation_heard: Newest generation that the coordinator or a shard has named.
    """

    def __init__(self, worker: WorkerKey, clip_grad_norm: float = 0.0) -> None:
        self.worker = worker
        self.clip_grad_norm = clip_grad_norm
        self.record: Record | None = None
        self.sequence = 0
        self.generation_heard = 0
        self._was_member = False

    @property
    def member(self) -> Member | None:
        """This worker's place in the newest record, if it has one."""
        return self.record.member_of(self.worker) if self.record is not None else None

    @property
    def generation(self) -> int:
        """That of the newest record, 0 before the start."""
        return self.record.generation if self.record is not None else 0

    def take_record(self, record: Record) -> Evicted | None:
        """Goes on by a record, unless a newer one is known."""
        if record.generation < self.generation:
            return None
        self.record = record
        self.generation_heard = max(self.generation_heard, record.generation)
        was_member, self._was_member = self._was_member, self.member is not None
        if not was_member or self._was_member:
            return None
        for end in record.departures:
            if end.member.worker == self.worker:
                return Evicted(end.last_clock)
        return Evicted(None)

    def join(self, seeded_fence: int | None = None) -> Pull | None:
        """What a worker that has become a member pulls before its first push.

        Args:
            seeded_fence: Number of the order to seed that it has carried out, if any.

        Returns:
            Nothing for who has seeded the values that the job starts with.

        Raises:
            EvictedError: The newest record has no place for it.
        """
        self.sequence = 0
        record, member = self._place()
        if seeded_fence == record.fence_number:
            return None
        return Pull(record.generation, member.clock_of(0))

    def next_push(self) -> NextPush:
        """Where the next push belongs.

        Raises:
            EvictedError: The newest record has no place for this worker.
        """
        record, member = self._place()
        sequence = self.sequence + 1
        return NextPush(
            generation=record.generation,
            sequence=sequence,
            clock=member.clock_of(sequence),
            # One push is under way at a time.
            sequence_unacknowledged_min=sequence,
            is_of_longest=record.has_longest(self.worker),
        )

    def open(self, sequence: int, chunk_indexes: Sequence[Collection[int]]) -> OpenPush:
        """A push that is about to be sent, for the first time or again.

        Args:
            sequence: Its number.
            chunk_indexes: For each shard, the chunks that are part of it.
        """
        return OpenPush(
            self.worker, sequence, chunk_indexes, clip_grad_norm=self.clip_grad_norm
        )

    def check(self, shard_index: int, reply: PushReply) -> None:
        """Checks an answer to a push or a pull.

        Raises:
            StalenessError: The values may be older than the mode allows.
        """
        check_bound(shard_index, reply, self.record)

    def conclude(self, sequence: int, replies: Sequence[PushReply]) -> Settled | Missed:
        """What the answers of all shards to a push come to."""
        generation = max(reply.generation for reply in replies)
        self.generation_heard = max(self.generation_heard, generation)
        result = combine(replies)
        if not result.dropped:
            return Settled(result)
        newest = max(sequence, *(reply.closed_sequence for reply in replies))
        return Missed(generation, newest)

    def acknowledge(self, sequence: int) -> None:
        """A push, and all before it, are settled here too."""
        self.sequence = max(self.sequence, sequence)

    def catch_up(self, missed: Missed) -> Pull | None:
        """Where a worker goes on whose push was dropped.

        Returns:
            What to pull then, None until the record is here that clocks are counted by.

        Raises:
            EvictedError: That record has no place for this worker.
        """
        if self.generation < missed.generation:
            return None
        record, member = self._place()
        self.acknowledge(missed.sequence)
        return Pull(record.generation, member.clock_of(missed.sequence))

    def _place(self) -> tuple[Record, Member]:
        member = self.member
        if self.record is None or member is None:
            raise EvictedError(
                f"worker {self.worker.worker_id} is no member of the job any more"
            )
        return self.record, member


def was_done(sequence: int, done: Collection[int]) -> bool:
    """Whether the push that was under way at an eviction counts.

    It is never sent under the new start's name: the record of the eviction has closed
    it on every shard alike. Source: docs/decisions/0007.

    Args:
        sequence: The push.
        done: Of every shard, the lost start's last push that is done.
    """
    return all(sequence <= each for each in done)


def outcome_of_closed(*, is_finite: bool) -> Outcome:
    """What became of a lost start's push that is done, where shards do not answer it.

    In SSP and ASP they answer no start that has ended. There each push has only itself
    to be skipped for.

    Args:
        is_finite: Whether its gradient was finite.
    """
    return Outcome.APPLIED if is_finite else Outcome.SKIPPED


def outcome_of_done(outcomes: Collection[Outcome]) -> str:
    """What became of a lost start's push that is done, from what each shard says."""
    return worst_outcome(outcomes).replace("duplicate", "applied")


def check_bound(shard_index: int, reply: PushReply, record: Record | None) -> None:
    """Checks one shard's answer to a push or pull.

    Args:
        shard_index: Whose answer.
        reply: The answer.
        record: Newest record known here.

    Raises:
        StalenessError: The values may be older than the mode allows, or were given
            under another mode than the record's.
    """
    if reply.outcome is Outcome.DROPPED:
        return  # what comes next is a pull, whose answer is checked
    if record is not None and record.generation == reply.generation:
        _check_rule(shard_index, reply, record)
    bound = reply.mode.rules.lag_max(reply.staleness_bound)
    if bound is not None and reply.clock - reply.frontier > bound:
        raise StalenessError(
            f"shard {shard_index} gave values for clock {reply.clock} at frontier "
            f"{reply.frontier}, and in {_rule(reply.mode, bound)} the frontier must be "
            f"at least {reply.clock - bound}; {_BUG}",
            facts=_facts(shard_index, reply),
        )


def _check_rule(shard_index: int, reply: PushReply, record: Record) -> None:
    """Up to the clock of a change, the mode before rules."""
    is_other = reply.mode is not record.mode or (
        reply.mode.rules.takes_bound and reply.staleness_bound != record.staleness_bound
    )
    if is_other and reply.clock > record.mode_clock:
        raise StalenessError(
            f"shard {shard_index} gave values for clock {reply.clock} at frontier "
            f"{reply.frontier} in {_rule(reply.mode, reply.staleness_bound)}, but "
            f"generation {record.generation} trains in "
            f"{_rule(record.mode, record.staleness_bound)}; {_BUG}",
            facts=_facts(shard_index, reply),
        )


def _rule(mode: Mode, bound: int) -> str:
    if not mode.rules.takes_bound:
        return mode.label
    return f"{mode.label} with staleness bound {bound}"


def _facts(shard_index: int, reply: PushReply) -> dict[str, str]:
    return {
        "shard_index": str(shard_index),
        "clock": str(reply.clock),
        "frontier": str(reply.frontier),
        "mode": reply.mode.label,
        "staleness_bound": str(reply.staleness_bound),
    }
