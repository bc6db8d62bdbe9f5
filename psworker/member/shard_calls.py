"""What a worker does with all shards of its job at once.

On the event loop. A call that changes nothing is made again while its outcome is
unknown; those of a push are in `psworker.member.push_calls`.
"""

import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial

from pswire.membership import Outcome, WorkerKey
from pswire.placement import Placement
from pswire.reasons import ErrorReason
from pswire.shared_memory.segments import boot_id
from psworker.errors import WaitTimeoutError
from psworker.member.ahead_calls import AheadCalls
from psworker.member.core import outcome_of_closed, was_done
from psworker.member.membership import Membership
from psworker.member.optimizer_state_calls import ShardStateCalls
from psworker.member.outgoing_push import OutgoingPush
from psworker.member.push_calls import PushCalls
from psworker.member.push_history import PushHistory
from psworker.member.shard_reach import (
    QUESTION_TIMEOUT_S,
    ReportSilence,
    ShardClients,
    ShardReach,
    ShardSilence,
    report_nothing,
)
from psworker.transport.calls import (
    CallError,
    all_or_none,
    now,
    told_to_users,
    until_decided,
)
from psworker.transport.ports import Receiver, Traffic
from psworker.transport.shard_segments import (
    Declined,
    Segments,
    ShardSegments,
    segments_of,
)
from psworker.transport.values import ContributionAwaited, PushReply, SeedOrder

_CLOSED = ErrorReason.WORKER_INCARNATION_STALE


class ShardCalls:
    """Calls to every shard, as the newest shard map says.

    Attributes:
        traffic: Bytes of all messages.
        states: Calls for optimizer state.
        reach: Asks shards whether they are there.
    """

    def __init__(
        self,
        job_id: str,
        membership: Membership,
        *,
        traffic: Traffic | None = None,
        history: PushHistory | None = None,
        report_silence: ReportSilence = report_nothing,
        lease_s: float = math.inf,
    ) -> None:
        """Makes no call yet.

        Args:
            job_id: The job.
            membership: Who calls, and what the coordinator has sent.
            traffic: Bytes of an earlier start's messages, to go on with.
            history: Records pushes and pulls, for an offline check.
            report_silence: Reports shards that do not answer to the coordinator.
            lease_s: Silence after which a shard counts as out of reach.
        """
        self._worker = membership.worker
        self._membership = membership
        self.traffic = traffic or Traffic()
        self._clients = ShardClients(job_id, membership, self.traffic)
        self.reach = ShardReach(self._clients, report_silence, lease_s=lease_s)
        self.states = ShardStateCalls(self.reach)
        self._history = history or PushHistory()

    async def close(self) -> None:
        """Ends the channels to all shards."""
        await self.reach.close()
        await self._clients.close()

    @property
    def segments(self) -> Segments:
        """Memory shared with shards."""
        return self._clients.segments

    @property
    def incarnations(self) -> list[int]:
        """The start of each shard that the newest shard map names."""
        return [shard.incarnation for shard in self._membership.shards]

    async def seed(
        self,
        order: SeedOrder,
        chunks_of: Callable[[int], Iterable[bytes]],
        *,
        timeout_s: float,
    ) -> None:
        """Stages first values on every shard.

        Args:
            order: The coordinator's order.
            chunks_of: The `SeedRequest`s of a shard.
            timeout_s: Longest time for all of it.

        Raises:
            CallError: A shard did not take them; the next order may go better.
        """

        async def seed_one(shard_index: int) -> None:
            client = await self._clients.of(shard_index)
            await client.seed(
                order.fence_number, chunks_of(shard_index), timeout_s=timeout_s
            )

        await self._membership.unless_failed(
            all_or_none(seed_one(shard.shard_index) for shard in order.shards)
        )

    async def open_segments(
        self, placement: Placement, *, is_wanted: bool, timeout_s: float
    ) -> None:
        """Shares memory with the shards that are on this machine, as a member.

        Args:
            placement: How tensors are cut.
            is_wanted: Whether this worker shares memory at all.
            timeout_s: Longest time for all of it.

        Raises:
            PsError: The job can't go on.
        """
        deadline = now() + timeout_s
        if not is_wanted or not boot_id():
            why = "it is switched off here" if not is_wanted else "this system lacks it"
            declined = [Declined(why, is_expected=True)] * len(self._membership.shards)
            self._clients.segments = segments_of(declined)
            return

        async def open_one(shard_index: int) -> ShardSegments | Declined:
            async def attempt(timeout_s: float) -> ShardSegments | Declined:
                client = await self._clients.of(shard_index)
                return await client.open_segments(
                    self._membership.generation, placement, timeout_s=timeout_s
                )

            try:
                return await until_decided(attempt, deadline)
            except CallError as error:
                # Whatever it is, the calls that matter will fail by it.
                return Declined(str(error), is_expected=False)

        count = len(self._membership.shards)
        found = await self._membership.unless_failed(
            all_or_none(map(open_one, range(count)))
        )
        self._clients.segments = segments_of(found)

    async def pull(
        self,
        generation: int,
        clock: int,
        receiver: Receiver,
        *,
        held_digests: Sequence[Sequence[int]],
        timeout_s: float,
    ) -> Sequence[PushReply]:
        """Receives all values that this worker may see at a clock.

        Args:
            generation: Newest generation that it knows.
            clock: The clock.
            receiver: Takes the values.
            held_digests: For each shard, of the elements of each of its chunks as they
                are here: the same are not sent again.
            timeout_s: Longest time for all of it.

        Raises:
            WaitTimeoutError: It took longer; the text names who was waited for.
            PsError: A shard refused it, or the job can't go on.
        """
        deadline = now() + timeout_s
        silence = ShardSilence(self.reach, clock, receiver.on_waiting)

        async def pull_one(shard_index: int) -> PushReply:
            own = silence.receiver(shard_index, receiver)

            async def attempt(timeout_s: float) -> PushReply:
                client = await self._clients.of(shard_index)
                return await client.pull(
                    generation,
                    clock,
                    own,
                    held_digests=held_digests[shard_index],
                    timeout_s=timeout_s,
                )

            reply = await until_decided(
                attempt, deadline, on_failure=partial(silence.failed, shard_index)
            )
            silence.answered(shard_index, reply.clock)
            self._membership.core.check(shard_index, reply)
            return reply

        work = all_or_none(map(pull_one, range(len(self._membership.shards))))
        try:
            with silence:
                replies = await self._membership.unless_failed(work)
            self._history.pulled(self._worker, clock, replies)
            return replies
        except CallError as error:
            if not error.is_retryable:
                raise error.to_ps_error() from None
            raise WaitTimeoutError(
                f"the values of clock {clock} were not there within {timeout_s:g} s: "
                f"{silence.awaited(error)}",
                reason=ErrorReason.WAIT_TIMEOUT,
            ) from None

    def begin_ahead(self, calls: AheadCalls) -> None:
        """Opens the calls of a push that is to come, from any thread."""

        async def open_one(
            shard_index: int, requests: AsyncGenerator[bytes, None], receiver: Receiver
        ) -> PushReply:
            client = await self._clients.of(shard_index)
            return await client.push_pull(requests, receiver, timeout_s=None)

        calls.begin(open_one)

    async def push(
        self,
        pushes: Sequence[OutgoingPush],
        receiver: Receiver,
        *,
        timeout_s: float,
        ahead: AheadCalls | None = None,
        asks_first: bool = False,
    ) -> Sequence[PushReply]:
        """Sends one push to all shards, until each has answered; see `PushCalls`."""
        calls = PushCalls(
            self.reach,
            self._history,
            pushes,
            receiver,
            timeout_s=timeout_s,
            ahead=ahead,
        )
        return await calls.run(asks_first=asks_first)

    async def was_done(self, worker: WorkerKey, sequence: int) -> bool:
        """Whether a push of a departed start of this worker is part of the parameters.

        All shards answer the same, since the record that ended it says up to which.
        """

        async def ask_one(shard_index: int) -> int:
            async def attempt(timeout_s: float) -> int:
                client = await self._clients.of(shard_index)
                session = await client.get_session(worker, timeout_s=timeout_s)
                return session.sequence_done_max

            return await until_decided(attempt, now() + QUESTION_TIMEOUT_S)

        with told_to_users():
            done = await self._membership.unless_failed(
                all_or_none(map(ask_one, range(len(self._membership.shards))))
            )
        is_done = was_done(sequence, done)
        self._history.push_settled(worker, sequence, was_done=is_done)
        return is_done

    async def outcomes_of(self, pushes: Sequence[OutgoingPush]) -> list[Outcome]:
        """What the shards say of a push that is done, of a departed start too."""
        nothing = Receiver(on_chunk=lambda _: None, on_waiting=lambda _: None)

        async def ask_one(shard_index: int) -> Outcome:
            push = pushes[shard_index]

            async def attempt(timeout_s: float) -> Outcome:
                client = await self._clients.of(shard_index)
                requests = push.requests(push.chunk_indexes)
                reply = await client.push_pull(requests, nothing, timeout_s=timeout_s)
                return reply.outcome

            try:
                return await until_decided(attempt, now() + QUESTION_TIMEOUT_S)
            except CallError as error:
                if not error.refusal or error.refusal.reason != _CLOSED:
                    raise
                return outcome_of_closed(is_finite=push.is_finite)

        with told_to_users():
            return await self._membership.unless_failed(
                all_or_none(map(ask_one, range(len(pushes))))
            )

    async def await_contribution(
        self, generation: int, clock: int, sequence: int
    ) -> ContributionAwaited:
        """Returns once a clock waits for nobody but workers that have no data.

        Has no limit of its own: whoever asks cancels it when there is data.
        """

        async def attempt(timeout_s: float) -> ContributionAwaited:
            client = await self._clients.of(0)
            return await client.await_contribution(
                generation, clock, sequence, timeout_s=timeout_s
            )

        while True:
            try:
                return await self._membership.unless_failed(
                    until_decided(attempt, now() + QUESTION_TIMEOUT_S)
                )
            except CallError as error:
                if not error.is_retryable:
                    raise error.to_ps_error() from None
