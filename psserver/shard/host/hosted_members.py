"""What a shard's host keeps for each worker: its calls, and what it was sent."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from psserver.shard.core.effects import ContributionAwaited, HyperparametersDiffer
from psserver.shard.core.push import PushId
from psserver.shard.core.shard import ShardCore
from psserver.shard.host.push_session import ProvisionalChunks, PushSession
from psserver.shard.tensors.sent_values import SentValues
from pswire.membership import Record, WorkerKey
from pswire.optimizer_states import ChunkState
from pswire.reasons import ErrorReason, Refusal
from pswire.shared_memory.segments import MemorySegment

CALLS_OF_WORKER_MAX: Final = 8
"""Calls that carry pushes of one worker. It has one, or two where steps overlap, and
those that it has given up and whose end has not come yet."""

MEMBERS_ONLY = "only members read and load optimizer state"

RESTING_OF_WORKER_MAX: Final = 4
"""Calls of one worker that rest. It has one; others are of connections that broke, and
whose end has not come yet."""

log = logging.getLogger("psserver.shard")


@dataclass(frozen=True, slots=True)
class StagedState:
    """Optimizer state that a worker has sent and that its push will load.

    Attributes:
        sequence: The push.
        optimizer: Name of the optimizer.
        chunks: State by chunk; what is not named is without.
    """

    sequence: int
    optimizer: str
    chunks: Mapping[int, ChunkState]


@dataclass(slots=True)
class GradientSegments:
    """Memory in which a worker on this machine puts its gradients.

    Attributes:
        used: Where its chunks are.
        offered: Handed over later, and nothing was pushed from it yet.
        reads_values: Whether it reads values in shared memory, too.
    """

    used: MemorySegment
    offered: MemorySegment | None = None
    reads_values: bool = False

    def numbered(self, number: int) -> MemorySegment | None:
        """The one with a number."""
        for segment in (self.used, self.offered):
            if segment is not None and segment.header.number == number:
                return segment
        return None

    def use(self, segment: MemorySegment) -> None:
        """A chunk is in it. The one before is not needed any more."""
        if segment is self.offered:
            self.used, self.offered = segment, None


@dataclass(slots=True)
class PeerWait:
    """How long the pushes of a member wait for those of others.

    From the moment that one is complete: until the last push of its clock is, or, where
    pushes are applied one by one, from its end until it may be answered.

    Attributes:
        waited_s: All that have been answered.
        complete_s: When the push was complete that is not done yet, None for none.
        held_s: When the push was done whose answer has to wait, None for none.
        told_s: Of `waited_s`, what the member knows of.
    """

    waited_s: float = 0.0
    complete_s: float | None = None
    held_s: float | None = None
    told_s: float = 0.0

    def note_complete(self, now_s: float) -> None:
        """Its push is complete; said again, nothing changes."""
        if self.complete_s is None:
            self.complete_s = now_s

    def note_done(self, now_s: float, last_complete_s: float | None) -> None:
        """Its push is done.

        Args:
            now_s: The time.
            last_complete_s: When the last push of its clock was complete; None for a
                push that is applied by itself, whose answer may have to wait.
        """
        complete_s, self.complete_s = self.complete_s, None
        if last_complete_s is None:
            self.held_s = now_s
        elif complete_s is not None:
            self.waited_s += max(0.0, last_complete_s - complete_s)

    def note_answered(self, now_s: float) -> None:
        """Its push is answered."""
        if self.held_s is not None:
            self.waited_s += now_s - self.held_s
            self.held_s = None

    def take_news(self) -> float:
        """Seconds that the member does not know of; asked again, there are none."""
        new_s, self.told_s = self.waited_s - self.told_s, self.waited_s
        return new_s

    def total_s(self, now_s: float) -> float:
        """All it has waited, with the wait that is under way."""
        began_s = self.held_s if self.complete_s is None else self.complete_s
        return self.waited_s + (0.0 if began_s is None else now_s - began_s)


@dataclass(slots=True)
class HostedMember:
    """One start of one worker. In the event loop alone, but for `sent`.

    Attributes:
        worker: The worker.
        calls: Calls that carry its pushes, oldest first.
        sessions: By sequence, the newest call of a push.
        resting: Calls that wait for its next push, in the order in which they began.
        ahead: Its call that sends chunks ahead of their trailer.
        idle: Its call that waits until a clock waits only for workers without data.
        state: Optimizer state for its next push.
        segments: Memory that it shares.
        difference: Hyperparameters of its own that do not count, until its next reply
            says so.
        has_contradicted: Whether its bytes contradicted its finite verdict.
        sent: Values that it was sent; None for one that is no member.
        peers: How long its pushes have waited for others.
    """

    worker: WorkerKey
    calls: list[PushSession] = field(default_factory=list)
    sessions: dict[int, PushSession] = field(default_factory=dict)
    resting: dict[asyncio.Task[object], None] = field(default_factory=dict)
    ahead: ProvisionalChunks | None = None
    idle: "asyncio.Future[ContributionAwaited] | None" = None
    state: StagedState | None = None
    segments: GradientSegments | None = None
    difference: HyperparametersDiffer | None = None
    has_contradicted: bool = False
    sent: SentValues | None = None
    peers: PeerWait = field(default_factory=PeerWait)

    @property
    def reads_values(self) -> bool:
        """Whether it is sent where values are in shared memory, in their place."""
        return self.segments is not None and self.segments.reads_values

    # Pushes

    def begin_call(self, call: ProvisionalChunks) -> None:
        """It pushes by one more call, whose chunks go ahead of the trailer.

        Another that sends ahead is ended, and its oldest call if it has too many.
        """
        self.calls.append(call.session)
        if len(self.calls) > CALLS_OF_WORKER_MAX:
            self.calls.pop(0).fail(
                Refusal(
                    ErrorReason.DRAINING,
                    f"{self.worker} has {CALLS_OF_WORKER_MAX} newer calls that push",
                )
            )
        self.end_ahead(Refusal(ErrorReason.DRAINING, "a newer call sends ahead"))
        self.ahead = call

    def attach(self, sequence: int, session: PushSession) -> None:
        """A call's trailer has come: it is the one of its push from now on.

        One that was there before is ended.
        """
        if self.ahead is not None and self.ahead.session is session:
            self.ahead = None
        if known := self.sessions.get(sequence):
            known.fail(
                Refusal(ErrorReason.DRAINING, "a newer call carries the same push")
            )
        self.sessions[sequence] = session

    def end_call(self, sequence: int, session: PushSession) -> None:
        """A call that carries a push has ended."""
        if self.sessions.get(sequence) is session:
            del self.sessions[sequence]
        if session in self.calls:
            self.calls.remove(session)
        if self.ahead is not None and self.ahead.session is session:
            self.ahead = None

    def end_ahead(self, refusal: Refusal) -> None:
        """Ends the call that sends ahead with an error."""
        if self.ahead is not None:
            self.ahead.fail(refusal)
            self.ahead = None

    # Having no data

    def begin_idle(self) -> "asyncio.Future[ContributionAwaited]":
        """It has no data for its next push; a call that said so before is ended."""
        self.end_idle(
            Refusal(ErrorReason.DRAINING, "a newer call asks for the same worker")
        )
        self.idle = asyncio.get_running_loop().create_future()
        return self.idle

    def answer_idle(self, awaited: ContributionAwaited) -> None:
        """A clock waits for this worker."""
        if self.idle is not None and not self.idle.done():
            self.idle.set_result(awaited)

    def end_idle(self, refusal: Refusal) -> None:
        """Ends the call with an error."""
        if self.idle is not None and not self.idle.done():
            self.idle.set_exception(refusal)

    # Optimizer state

    def stage_state(
        self,
        core: ShardCore,
        sequence: int,
        optimizer: str,
        chunks: Mapping[int, ChunkState],
    ) -> None:
        """Keeps what it has sent, in place of what it sent before.

        Raises:
            Refusal: As `check_next`, or `PUSH_CONFLICT` for a push that is under way;
                no state changed.
        """
        push = PushId(self.worker, sequence)
        check_next(core, push)
        entry = core.on_shard.entry_of(push)
        if entry is not None and entry.trailer is not None and entry.outcome is None:
            raise Refusal(
                ErrorReason.PUSH_CONFLICT,
                f"push {sequence} of {self.worker} is under way: state for it is too "
                "late",
            )
        if sequence > core.closed_sequence(self.worker):
            self.state = StagedState(sequence, optimizer, chunks)

    def state_of(self, sequence: int, optimizer: str) -> StagedState | None:
        """What a push loads, if it is there."""
        state = self.state
        if state is None or (state.sequence, state.optimizer) != (sequence, optimizer):
            return None
        return state

    def check_state(self, core: ShardCore, sequence: int, optimizer: str) -> None:
        """Refuses a trailer that would load what is not here.

        A push that is done loads nothing any more: with backup workers its clock may
        have closed without it.

        Raises:
            Refusal: `RECOVERING`.
        """
        if sequence <= core.closed_sequence(self.worker):
            return
        if self.state_of(sequence, optimizer) is None:
            raise Refusal(
                ErrorReason.RECOVERING,
                f"push {sequence} of {self.worker} loads state of "
                f"{optimizer[:64]!r}, and none is staged for it",
            )

    def drop_state(self, sequence_max: int) -> None:
        """Pushes up to this one load nothing any more."""
        if self.state is not None and self.state.sequence <= sequence_max:
            self.state = None


class HostedMembers:
    """The members, and who still has a call open although it is none any more."""

    def __init__(self) -> None:
        self._all: dict[WorkerKey, HostedMember] = {}

    def __iter__(self) -> Iterator[HostedMember]:
        """All of them."""
        return iter(self._all.values())

    def of(self, worker: WorkerKey) -> HostedMember:
        """What is kept for a worker, whose call the core has admitted."""
        known = self._all.get(worker)
        if known is None:
            known = self._all[worker] = HostedMember(worker)
        return known

    def session_of(self, push: PushId) -> PushSession | None:
        """The call of a push, if there is one."""
        known = self.find(push.worker)
        return None if known is None else known.sessions.get(push.sequence)

    def find(self, worker: WorkerKey) -> HostedMember | None:
        """What is kept for a worker, None for nothing."""
        return self._all.get(worker)

    def sent_to(self, worker: WorkerKey) -> SentValues | None:
        """What a member was sent, None for who is no member."""
        known = self._all.get(worker)
        return None if known is None else known.sent

    def reads_values(self, worker: WorkerKey) -> bool:
        """Whether a worker is sent where values are in shared memory."""
        known = self._all.get(worker)
        return known is not None and known.reads_values

    @property
    def sharing(self) -> list[WorkerKey]:
        """Workers whose tensors go through shared memory, in order."""
        return sorted(known.worker for known in self if known.reads_values)

    @property
    def oldest_ms(self) -> int | None:
        """Since when the oldest call is there; None when there is none."""
        return min(
            (each.opened_ms for known in self for each in known.sessions.values()),
            default=None,
        )

    def follow(
        self, record: Record, last_sequence_of: Callable[[WorkerKey], int]
    ) -> None:
        """Makes what is kept for new members, and drops it for who is none any more.

        Nothing else drops it. Calls of a worker that has ended stay until they end,
        and its state while the push that loads it counts.

        Args:
            record: Says who the members are.
            last_sequence_of: The last push that counts of one that has ended.
        """
        members = {member.worker for member in record.members}
        for worker in members:
            known = self.of(worker)
            known.sent = known.sent or SentValues()
            # With clocks nothing comes late, and no copies are kept.
            known.sent.keep_copies(not record.mode.rules.is_clocked)
        for known in [each for each in self if each.worker not in members]:
            left = self._end(known, record.generation, last_sequence_of(known.worker))
            if left is None:
                del self._all[known.worker]
            else:
                self._all[known.worker] = left

    @staticmethod
    def _end(
        known: HostedMember, generation: int, last_sequence: int
    ) -> HostedMember | None:
        """Ends a worker's membership; what is left of it."""
        stale = ErrorReason.WORKER_INCARNATION_STALE
        known.end_idle(
            Refusal(stale, f"{known.worker} is no member of generation {generation}")
        )
        known.end_ahead(
            Refusal(
                stale,
                f"{known.worker} is no member any more; what it sent ahead is dropped",
            )
        )
        if known.state is not None and known.state.sequence > last_sequence:
            known.state = None
        if not (known.calls or known.sessions or known.resting or known.state):
            return None
        return HostedMember(
            known.worker,
            calls=known.calls,
            sessions=known.sessions,
            resting=known.resting,
            state=known.state,
        )

    def end_calls(self, refusal: Refusal) -> None:
        """Ends every call that waits with an error."""
        for known in self:
            for session in known.sessions.values():
                session.fail(refusal)
            known.end_ahead(refusal)
            known.end_idle(refusal)


def check_next(core: ShardCore, push: PushId) -> None:
    """Refuses state for a push beyond the sender's next.

    One that is done needs none: with backup workers its clock may have closed.

    Raises:
        Refusal: `WORKER_INCARNATION_STALE` or `SEQUENCE_GAP`.
    """
    if core.clocks.member_of(push.worker) is None:
        raise Refusal(
            ErrorReason.WORKER_INCARNATION_STALE,
            f"{push.worker} is no member; {MEMBERS_ONLY}",
        )
    done = core.closed_sequence(push.worker)
    if push.sequence > done + 1:
        raise Refusal(
            ErrorReason.SEQUENCE_GAP,
            f"state is staged for push {push.sequence} of {push.worker}, the next "
            f"is {done + 1}",
            sequence=push.sequence,
            sequence_done_max=done,
        )


class RestingCalls:
    """Calls that carry pushes one after the other, and have none just now.

    Their handlers, each a task of its own, wait for the next push, which may never
    come. So they wait for so long, and few for one worker; and a shard that stops ends
    them, since it would wait for them otherwise. With such a call nothing is lost: the
    next push opens another one.

    Args:
        members: Whose they are.
        rest_s: Longest time between two pushes of a call.
    """

    def __init__(self, members: HostedMembers, rest_s: float) -> None:
        self._members = members
        self._rest_s = rest_s
        self._unnamed: dict[asyncio.Task[object], None] = {}  # before their first push
        self._given_way: set[asyncio.Task[object]] = set()
        self._is_over = False

    async def next(
        self, requests: AsyncIterator[bytes], worker: WorkerKey | None
    ) -> bytes | None:
        """The next message of the running handler's call; None when the call ends.

        Args:
            requests: Its messages.
            worker: Whose pushes it has carried, None before the first.

        Raises:
            Refusal: The shard stops.
        """
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        if self._is_over:
            return None
        own = self._unnamed if worker is None else self._members.of(worker).resting
        own[task] = None
        if worker is not None and len(own) > RESTING_OF_WORKER_MAX:
            oldest = next(iter(own))
            del own[oldest]
            self._given_way.add(oldest)
            oldest.cancel()
        try:
            async with asyncio.timeout(self._rest_s):
                return await anext(requests, None)
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            if task in self._given_way:
                return None
            if not self._is_over:
                raise  # the client has hung up
            raise Refusal(ErrorReason.DRAINING, "the shard is shutting down") from None
        finally:
            own.pop(task, None)
            self._given_way.discard(task)

    def end_all(self) -> None:
        """Ends these calls, also those that are carrying a push by now, after it."""
        self._is_over = True
        for tasks in (self._unnamed, *(known.resting for known in self._members)):
            for task in tasks:
                task.cancel()
