"""What one start of a worker decides in the protocol: a state machine, without calls.

Records, answers of shards and failed calls come in; what to send or pull next is
returned. The drivers make the calls and keep the time: in a process the event loop and
the user's thread, in tests the drawn schedules. Source: docs/decisions/0014.

A push on its way to all shards: a call whose outcome is unknown is followed by a
question, and what the shard has of the push is not sent again. Shards say `staged` once
they have everything that a clock needs, and say it again to a push of a clock that they
have committed already: its driver may have been lost before it did so elsewhere. A
worker that has the same from all of them commits it on all of them, and says what
follows from what they have measured. Any contributor is enough, and a repeated commit
changes nothing. A clock whose contributors died is finished by a record. Source:
docs/decisions/0006.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pswire.aggregation import UpdateRules
from pswire.membership import ClockChoice, Member, Mode, Outcome, Record, WorkerKey
from pswire.reasons import ErrorReason
from psworker.errors import EvictedError, StalenessError
from psworker.optim.push_result import PushResult, combine, worst_outcome
from psworker.transport.values import PushHeader, PushReply, SeedOrder, ShardSession

_CORRUPTION_COUNT_MAX: Final = 3

NOT_MEASURED: Final = UpdateRules()


@dataclass(frozen=True, slots=True)
class Send:
    """Send the push to a shard.

    Attributes:
        held: Chunks that the shard has already.
        is_first: Whether the shard can have nothing of it.
    """

    held: frozenset[int] = frozenset()
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a shard what it has of the push.

    Attributes:
        failure_count: Calls to it that have failed since the push was opened.
    """

    failure_count: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit a clock on all shards."""

    choice: ClockChoice


@dataclass(frozen=True, slots=True)
class Choose:
    """Ask shard 0 which pushes a clock consists of: all shards have this one."""

    clock: int
    sequence: int


class OpenPush:
    """A push until every shard has answered."""

    def __init__(
        self,
        worker: WorkerKey,
        sequence: int,
        chunk_indexes: Sequence[Collection[int]],
        *,
        update: UpdateRules = NOT_MEASURED,
        drives_others: bool = False,
    ) -> None:
        """Begins a push of which nothing is sent.

        Args:
            worker: Whose it is.
            sequence: Its number.
            chunk_indexes: For each shard, the chunks that are part of it.
            update: How the pushes of a clock become an update.
            drives_others: Whether it also commits a clock that closes without it, since
                those that it consists of may all be stopped.
        """
        self._worker = worker
        self.sequence = sequence
        self._chunk_indexes = [frozenset(each) for each in chunk_indexes]
        self._update = update
        self._drives_others = drives_others
        self._failure_counts = [0] * len(chunk_indexes)
        self._staged: dict[int, ClockChoice] = {}
        self._named: ClockChoice | None = None
        self._done: set[int] = set()

    @property
    def shard_count(self) -> int:
        """Shards that it goes to."""
        return len(self._chunk_indexes)

    def begin(self, *, asks_first: bool = False) -> Send | Ask:
        """What each shard gets first.

        Args:
            asks_first: Whether it may have some of the push from another process.
        """
        return Ask(0) if asks_first else Send(is_first=True)

    def failed(
        self, shard_index: int, reason: ErrorReason | None, *, is_retryable: bool
    ) -> Ask | None:
        """A call that carried the push has failed.

        Args:
            shard_index: Whose call.
            reason: Why the shard refused it, None where nobody did.
            is_retryable: Whether the same call may succeed later.

        Returns:
            None if it is over: the failure stands.
        """
        count = self._failure_counts[shard_index] = (
            self._failure_counts[shard_index] + 1
        )
        is_corrupt = reason is ErrorReason.CHUNK_DIGEST_MISMATCH
        if not is_retryable or (is_corrupt and count > _CORRUPTION_COUNT_MAX):
            return None
        return Ask(count)

    def found(self, shard_index: int, session: ShardSession) -> Send:
        """A shard says what it has of this worker's pushes."""
        if self.sequence <= session.sequence_done_max:
            self._done.add(shard_index)
            return Send(self._chunk_indexes[shard_index])
        return Send(session.held_chunks.get(self.sequence, frozenset()))

    def staged(self, shard_index: int, choice: ClockChoice) -> Commit | Choose | None:
        """A shard has everything that it needs for a clock with these contributors."""
        self._staged[shard_index] = choice
        if not choice.workers:
            self._named = None  # it has not heard, or forgotten, what was named
        return self.agree()

    def agree(self) -> Commit | Choose | None:
        """What follows once all shards have said the same, and until then nothing.

        Where clocks are measured, with what follows from what all shards have measured.
        """
        staged = self._staged
        if len(staged) < self.shard_count or len(self._done) == self.shard_count:
            return None
        # In the order of shards, as every worker that commits adds them up.
        parts = tuple(staged[index] for index in sorted(staged))
        found = {(each.clock, each.workers) for each in parts if each.workers}
        if not all(each.workers for each in parts):
            # With backup workers: a shard speaks of this worker's push alone. Others
            # may have heard whose pushes count, by a driver that was lost in between.
            is_told = self._named is not None and found == {self._named[:2]}
            return None if is_told else Choose(parts[0].clock, self.sequence)
        if len(found) > 1:
            return None
        choice = self._update.decided(parts)
        return self.chosen(
            choice._replace(parts=parts if self._update.is_measured else ())
        )

    def chosen(self, choice: ClockChoice) -> Commit | None:
        """The contributors of the clock are known, or that it is closed already."""
        self._named = choice
        drives = self._worker in choice.workers or self._drives_others
        return Commit(choice) if drives and choice.workers else None


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
class Join:
    """Ask the coordinator for a place.

    Attributes:
        view_count: Views of the job before the question: what `joined` wants to know.
    """

    view_count: int


@dataclass(frozen=True, slots=True)
class Seed:
    """Write the values that the job starts with to all shards."""

    order: SeedOrder


@dataclass(frozen=True, slots=True)
class Pull:
    """Pull all values from all shards.

    Attributes:
        generation: Of the record that the clock is counted by.
        clock: The worker's clock.
    """

    generation: int
    clock: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The worker is a member.

    Attributes:
        record: The newest record.
        member: Its place.
        pull: What it pulls before its first push; nothing for who has seeded the values
            that the job starts with.
    """

    record: Record
    member: Member
    pull: Pull | None


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
        update: How the pushes of a clock become an update.
        record: Newest record, None before the start.
        sequence: Last push that is settled on every shard.
        generation_heard: Newest generation that the coordinator or a shard has named.
        view_count: How often the coordinator has sent all that it knows.
        order: Order to seed, None while another worker is to.
    """

    def __init__(self, worker: WorkerKey, update: UpdateRules = NOT_MEASURED) -> None:
        self.worker = worker
        self.update = update
        self.record: Record | None = None
        self.sequence = 0
        self.generation_heard = 0
        self.view_count = 0
        self.order: SeedOrder | None = None
        self._was_member = False
        self._wants_place = False
        self._asked_view_count = 0
        self._seeded_order: SeedOrder | None = None

    @property
    def member(self) -> Member | None:
        """This worker's place in the newest record, if it has one."""
        return self.record.member_of(self.worker) if self.record is not None else None

    @property
    def generation(self) -> int:
        """That of the newest record, 0 before the start."""
        return self.record.generation if self.record is not None else 0

    @property
    def has_quorum(self) -> bool:
        """Whether clocks close without those that come late.

        A push asks first then, so that one that is late sends no bytes in vain.
        """
        return self.record is not None and self.record.mode.rules.has_quorum

    def counts_later(self, clock: int) -> bool:
        """Whether a push for a clock that closed without it counts in a later one.

        The mode that has closed it may be over.
        """
        record = self.record
        return self.has_quorum or (record is not None and clock <= record.terms_clock)

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

    # Joining

    def want_place(self) -> None:
        """The script wants to join, with values that no shard has."""
        # A new leader of a group has settled what the group's last start has pushed.
        self.sequence = 0
        self._wants_place = True
        self._asked_view_count = 0
        self._seeded_order = None

    def next_to_join(self) -> Join | Seed | Begin | None:
        """What a worker does that is to become a member; None: it waits."""
        record, member = self.record, self.member
        if record is not None and member is not None:
            pull = Pull(record.generation, member.clock_of(0))
            seeded = self._seeded_order
            is_seeder = seeded is not None and not self.is_over(seeded)
            return Begin(record, member, None if is_seeder else pull)
        # A coordinator that was started anew knows who is here, and not what they have
        # asked for.
        view_count = max(1, self.view_count)
        if self._wants_place and view_count > self._asked_view_count:
            return Join(view_count)
        order = self.order
        if order not in (None, self._seeded_order) and not self.is_over(order):
            return Seed(order)
        return None

    def joined(self, question: Join) -> None:
        """The coordinator has taken the question for a place."""
        self._asked_view_count = question.view_count

    def is_over(self, order: SeedOrder) -> bool:
        """Whether there is a newer order to seed, or a start by another one."""
        if self.record is not None:
            return self.record.fence_number != order.fence_number
        return self.order != order

    def seeded(self, order: SeedOrder) -> None:
        """All shards have all values of this worker."""
        self._seeded_order = order

    # Pushes

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
            self.worker,
            sequence,
            chunk_indexes,
            update=self.update,
            drives_others=self.has_quorum,
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
        closed = sorted(reply.closed_sequence for reply in replies)
        # Where it counts on some shards, the leader of a host group before has sent it
        # for a later clock, which the others are about to close with it.
        is_missed = all(reply.outcome is Outcome.DROPPED for reply in replies)
        newest = closed[-1] if is_missed else closed[0]
        return Missed(generation, max(sequence, newest))

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
        StalenessError: The values may be older than the mode allows, or were sent
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
