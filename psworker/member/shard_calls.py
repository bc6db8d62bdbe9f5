"""What a worker does with all shards of its job at once.

On the event loop. A call that changes nothing is made again while its outcome is
unknown; what follows a failed call of a push, and what is committed for it in the
second phase of a two-phase step, is decided by `OpenPush`.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from pswire import failpoints
from pswire.membership import ClockChoice, Outcome, WorkerKey
from pswire.placement import Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.shared_memory.segments import boot_id
from psworker.errors import StepTimeoutError, WaitTimeoutError
from psworker.member.ahead_calls import AheadCalls
from psworker.member.core import (
    Ask,
    Choose,
    Commit,
    OpenPush,
    Send,
    outcome_of_closed,
    was_done,
)
from psworker.member.membership import Interruption, Membership
from psworker.member.optimizer_state_calls import ShardStateCalls
from psworker.member.outgoing_push import OutgoingPush, requests_with_failpoints
from psworker.member.push_history import PushHistory
from psworker.member.shard_reach import (
    ReportSilence,
    ShardClients,
    ShardReach,
    ShardSilence,
    report_nothing,
)
from psworker.transport.calls import (
    CallError,
    all_or_none,
    left_s,
    now,
    pause,
    told_to_users,
    until_decided,
)
from psworker.transport.ports import Receiver, Traffic
from psworker.transport.shard_segments import (
    NO_SEGMENTS,
    Declined,
    ShardSegments,
    segments_of,
)
from psworker.transport.values import Contribution, PushReply, SeedOrder, ShardSession

T = TypeVar("T")

logger: Final = logging.getLogger("psworker")

_QUESTION_TIMEOUT_S = 10.0
_CLOSED = ErrorReason.WORKER_INCARNATION_STALE

ANSWER_TIMEOUT_S: Final = 1.0
"""Longest wait for the answers to commits of a push that is answered itself."""


class CommitCalls(Protocol):
    """Calls that a commit needs; each returns when it is decided."""

    async def commit(
        self, shard_index: int, choice: ClockChoice, deadline: float
    ) -> None:
        """Commits a clock on a shard. It may refuse, and says `staged` again then."""
        ...

    async def choose(self, clock: int, sequence: int, deadline: float) -> ClockChoice:
        """Which pushes a clock consists of, as shard 0 says once it knows."""
        ...


class Commits:
    """The commits of one push, as `OpenPush` decides them."""

    def __init__(self, push: OpenPush, calls: CommitCalls, deadline: float) -> None:
        self._push = push
        self._calls = calls
        self._deadline = deadline
        self._agreed = asyncio.Event()
        self._driving: asyncio.Task[None] | None = None
        self._is_calling = False
        self._is_answered = False
        self._wait = Interruption()

    def take_staged(self, shard_index: int, choice: ClockChoice) -> None:
        """A shard has everything that it needs for a clock with these contributors."""
        if self._push.staged(shard_index, choice) is not None:
            self._begin_driving()

    def take_answer(self, shard_index: int) -> None:
        """A shard has answered the push, perhaps before others are told to commit."""
        if self._push.answered(shard_index) is not None:
            self._begin_driving()

    def _begin_driving(self) -> None:
        self._agreed.set()
        if self._driving is None:
            # Most pushes are never staged, and are spared a task that waits for that.
            self._driving = asyncio.ensure_future(self._drive())
            self._driving.add_done_callback(self._end_driving)

    async def drive_until(self, pushing: Coroutine[Any, Any, T]) -> T:
        """The result of the push, which it may need a commit to get.

        Raises:
            CallError: The push, or a commit of it, was refused.
        """
        try:
            result = await self._wait.of(pushing)
            self._is_answered = True
            if self._driving is not None and self._is_calling:
                # Of those that commit one is the first, and the others' answers come a
                # moment later than that to the push. To cancel the calls for it would
                # cost a kilobyte for ever, each time (grpc/grpc#43360).
                await asyncio.wait({self._driving}, timeout=ANSWER_TIMEOUT_S)
            return result
        finally:
            if self._driving is not None:
                self._driving.cancel()
                await asyncio.gather(self._driving, return_exceptions=True)

    def _end_driving(self, driving: "asyncio.Task[None]") -> None:
        if not driving.cancelled() and (error := driving.exception()) is not None:
            self._wait.interrupt(error)

    async def _drive(self) -> None:
        while not self._is_answered:
            await self._agreed.wait()
            self._agreed.clear()
            step = self._push.agreed
            if step is None:
                continue
            if failpoints.armed:
                failpoints.hit("worker.staged")
            self._is_calling = True
            await self._carry_out(step)
            self._is_calling = False

    async def _carry_out(self, step: Commit | Choose | None) -> None:
        if isinstance(step, Choose):
            choice = await self._calls.choose(step.clock, step.sequence, self._deadline)
            step = self._push.chosen(choice)
        if step is not None and not self._is_answered:
            await all_or_none(
                self._calls.commit(shard_index, step.choice, self._deadline)
                for shard_index in range(self._push.shard_count)
            )


class ShardCalls:
    """Calls to every shard, as the newest shard map says.

    Attributes:
        traffic: Bytes of all messages.
        states: Calls for optimizer state.
        segments: Memory shared with shards.
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
        self.segments = NO_SEGMENTS
        self._clients = ShardClients(job_id, membership, self.traffic)
        self.reach = ShardReach(self._clients, report_silence, lease_s=lease_s)
        self.states = ShardStateCalls(self._clients, self.reach)
        self._answers: dict[int, tuple[float, int]] = {}  # when, and at which clock
        # Whether pushes wait for commits, as one has: they are streamed.
        self._commits = False
        self._history = history or PushHistory()

    async def close(self) -> None:
        """Ends the channels to all shards."""
        self.segments = NO_SEGMENTS
        await self.reach.close()
        await self._clients.close()

    def incarnation(self, shard_index: int) -> int:
        """The start of a shard that the newest shard map names."""
        return self._membership.shards[shard_index].incarnation

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
            count = len(self._membership.shards)
            self.segments = segments_of([Declined(why, is_expected=True)] * count)
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
        self.segments = segments_of(found)

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
            silence.answered(shard_index)
            return self._checked(shard_index, reply)

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
                f"{self._awaited(silence, error)}",
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
        """Sends one push to all shards, until each has answered.

        Args:
            pushes: Each shard's part.
            receiver: Takes the values and whom shards wait for.
            timeout_s: Longest time for all of it.
            ahead: Calls that have sent its chunks already, all but the trailer.
            asks_first: Whether shards may have some of it from another process.

        Raises:
            StepTimeoutError: It took longer; the text names who was waited for.
            PsError: A shard refused it, or the job can't go on.
        """
        deadline = now() + timeout_s
        silence = ShardSilence(self.reach, pushes[0].header.clock, receiver.on_waiting)
        push = self._membership.core.open(
            pushes[0].header.sequence, [each.chunk_indexes for each in pushes]
        )
        commits = Commits(push, self, deadline)

        async def push_one(shard_index: int) -> PushReply:
            def on_staged(choice: ClockChoice) -> None:
                self._commits = True
                commits.take_staged(shard_index, choice)

            own = silence.receiver(
                shard_index, Receiver(receiver.on_chunk, receiver.on_waiting, on_staged)
            )
            reply = await self._push_until_decided(
                shard_index,
                pushes,
                own,
                deadline,
                ahead,
                silence,
                push=push,
                step=push.begin(asks_first=asks_first),
            )
            silence.answered(shard_index)
            commits.take_answer(shard_index)
            if failpoints.armed:
                failpoints.hit("worker.push_answered")
            return self._checked(shard_index, reply)

        work = commits.drive_until(all_or_none(map(push_one, range(len(pushes)))))
        try:
            with silence, self._history.push(pushes[0].header) as answered:
                return answered(await self._membership.unless_failed(work))
        except CallError as error:
            if not error.is_retryable:
                raise error.to_ps_error() from None
            awaited = self._awaited(silence, error)
            raise StepTimeoutError(
                f"the step to clock {pushes[0].header.clock} was not complete within "
                f"{timeout_s:g} s: {awaited}; step() again goes on with the same push",
                reason=ErrorReason.WAIT_TIMEOUT,
            ) from None

    async def was_done(self, worker: WorkerKey, sequence: int) -> bool:
        """Whether a push of a departed start of this worker is part of the parameters.

        All shards answer the same, since the record that ended it says up to which.
        """

        async def ask_one(shard_index: int) -> int:
            async def attempt(timeout_s: float) -> int:
                client = await self._clients.of(shard_index)
                session = await client.get_session(worker, timeout_s=timeout_s)
                return session.sequence_done_max

            return await until_decided(attempt, now() + _QUESTION_TIMEOUT_S)

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
                return await until_decided(attempt, now() + _QUESTION_TIMEOUT_S)
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
    ) -> Contribution:
        """Returns once a clock waits for nobody but workers that have no data.

        Has no limit of its own: whoever asks cancels it when there is data.
        """

        async def attempt(timeout_s: float) -> Contribution:
            client = await self._clients.of(0)
            return await client.await_contribution(
                generation, clock, sequence, timeout_s=timeout_s
            )

        while True:
            try:
                return await self._membership.unless_failed(
                    until_decided(attempt, now() + _QUESTION_TIMEOUT_S)
                )
            except CallError as error:
                if not error.is_retryable:
                    raise error.to_ps_error() from None

    def _checked(self, shard_index: int, reply: PushReply) -> PushReply:
        self._answers[shard_index] = (now(), reply.clock)
        self._membership.core.check(shard_index, reply)
        return reply

    def _awaited(self, silence: ShardSilence, error: CallError) -> str:
        """Who did not come, with what is known of it, for the text of a time-out."""
        text = silence.awaited(error)
        if silence.is_said_by_shards:
            return text
        known = [
            f"shard {index} at clock {clock} {now() - at_s:.0f} s ago"
            for index, (at_s, clock) in sorted(self._answers.items())
        ]
        return f"{text} (last answers: {', '.join(known)})" if known else text

    async def _push_until_decided(
        self,
        shard_index: int,
        pushes: Sequence[OutgoingPush],
        receiver: Receiver,
        deadline: float,
        ahead: AheadCalls | None,
        silence: ShardSilence,
        *,
        push: OpenPush,
        step: Send | Ask,
    ) -> PushReply:
        """Carries out what one shard's part of a push needs, until it is answered."""
        while True:
            if isinstance(step, Ask):
                if step.failure_count:
                    await pause(step.failure_count - 1)
                session = await self._session_of(shard_index, deadline, silence)
                step = push.found(shard_index, session)
            try:
                if ahead is not None and ahead.is_open(shard_index):
                    call, ahead = ahead, None
                    return await call.complete(shard_index, pushes, receiver, deadline)
                return await self._send(shard_index, pushes, receiver, deadline, step)
            except CallError as error:
                silence.failed(shard_index, error)
                reason = error.refusal.reason if error.refusal is not None else None
                if error.refusal and reason == ErrorReason.SEGMENT_GONE:
                    await self._leave_segment(
                        shard_index, pushes[shard_index], error.refusal
                    )
                asking = push.failed(
                    shard_index, reason, is_retryable=error.is_retryable
                )
                if asking is None or now() >= deadline:
                    raise
                step = asking

    async def _send(
        self,
        shard_index: int,
        pushes: Sequence[OutgoingPush],
        receiver: Receiver,
        deadline: float,
        step: Send,
    ) -> PushReply:
        """Sends one shard's part of a push, and waits for the answer."""
        push, held = pushes[shard_index], step.held
        client = await self._clients.of(shard_index)
        # Failpoints of sending are between the messages of a stream.
        at_once = step.is_first and not (self._commits or failpoints.armed)
        goes_on = False
        if at_once and (whole := push.whole_message) is not None:
            reply = await client.push_pull_once(
                whole, receiver, timeout_s=left_s(deadline)
            )
            if reply is not None:
                return reply
            held, goes_on = push.chunk_indexes, True
        requests = (
            requests_with_failpoints(pushes, shard_index, held)
            if failpoints.armed
            else push.requests(held)
        )
        reply = await client.push_pull(requests, receiver, timeout_s=left_s(deadline))
        return _as_of_one_call(reply) if goes_on else reply

    async def commit(
        self, shard_index: int, choice: ClockChoice, deadline: float
    ) -> None:
        """Commits a clock on one shard.

        One that refuses, since its contributors are others, says `staged` again.
        """

        async def attempt(timeout_s: float) -> bool:
            client = await self._clients.of(shard_index)
            self._history.committed(self._worker, shard_index, choice.clock)
            return await client.commit(
                self._membership.generation, choice, timeout_s=timeout_s
            )

        await until_decided(attempt, deadline)

    async def choose(self, clock: int, sequence: int, deadline: float) -> ClockChoice:
        """Which pushes a clock consists of, as shard 0 says once it knows."""

        async def attempt(timeout_s: float) -> ClockChoice:
            client = await self._clients.of(0)
            return await client.ready(
                self._membership.generation, clock, sequence, timeout_s=timeout_s
            )

        return await until_decided(attempt, deadline)

    async def _leave_segment(
        self, shard_index: int, push: OutgoingPush, refusal: Refusal
    ) -> None:
        """Sends chunks in messages to a shard that has not this worker's memory."""
        segments = (await self._clients.of(shard_index)).segments
        assert segments is not None, "a chunk was said to be there"
        push.in_message = segments.in_message
        if self.segments.of(shard_index) is not None:
            self.segments = self.segments.without(shard_index)
            logger.warning(
                "tensors go over gRPC to shard %d from now on: %s",
                *(shard_index, refusal.message),
            )

    async def _session_of(
        self, shard_index: int, deadline: float, silence: ShardSilence
    ) -> ShardSession:
        """What a shard has of this worker's pushes; asked until it answers."""

        async def attempt(timeout_s: float) -> ShardSession:
            client = await self._clients.of(shard_index)
            return await client.get_session(
                self._worker, timeout_s=min(timeout_s, _QUESTION_TIMEOUT_S)
            )

        return await until_decided(
            attempt, deadline, on_failure=partial(silence.failed, shard_index)
        )


def _as_of_one_call(reply: PushReply) -> PushReply:
    """What a push comes to that was sent once and asked for by a second call.

    It may have been done in between; nothing of it was sent again.
    """
    if reply.outcome is Outcome.DUPLICATE:
        return replace(reply, outcome=Outcome.APPLIED)
    return reply
