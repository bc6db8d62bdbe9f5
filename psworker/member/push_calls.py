"""The calls of one push to all shards, until each has answered it.

On the event loop. What follows a failed call, and what is committed in the second phase
of a two-phase step, is decided by `OpenPush`.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from pswire import failpoints
from pswire.membership import ClockChoice, Outcome
from pswire.reasons import ErrorReason, Refusal
from psworker.errors import StepTimeoutError
from psworker.member.ahead_calls import AheadCalls
from psworker.member.core import Ask, Choose, Commit, OpenPush, Send
from psworker.member.membership import Interruption
from psworker.member.outgoing_push import OutgoingPush, requests_with_failpoints
from psworker.member.push_history import PushHistory
from psworker.member.shard_reach import (
    QUESTION_TIMEOUT_S,
    ShardReach,
    ShardSilence,
)
from psworker.transport.calls import (
    CallError,
    all_or_none,
    left_s,
    now,
    pause,
    until_decided,
)
from psworker.transport.ports import Receiver
from psworker.transport.values import PushReply, ShardSession

T = TypeVar("T")

logger: Final = logging.getLogger("psworker")

ANSWER_TIMEOUT_S: Final = 1.0
"""Longest wait for the answers to commits of a push that is answered itself."""


class CommitCalls(Protocol):
    """Calls that a commit needs; each returns when it is decided."""

    async def commit(self, shard_index: int, choice: ClockChoice) -> None:
        """Commits a clock on a shard. It may refuse, and says `staged` again then."""
        ...

    async def choose(self, clock: int, sequence: int) -> ClockChoice:
        """Which pushes a clock consists of, as shard 0 says once it knows."""
        ...


class Commits:
    """The commits of one push, as `OpenPush` decides them."""

    def __init__(self, push: OpenPush, calls: CommitCalls) -> None:
        self._push = push
        self._calls = calls
        self._agreed = asyncio.Event()
        self._driving: asyncio.Task[None] | None = None
        self._is_calling = False
        self._is_answered = False
        self._wait = Interruption()

    def take_staged(self, shard_index: int, choice: ClockChoice) -> None:
        """A shard has everything that it needs for a clock with these contributors."""
        if self._push.staged(shard_index, choice) is None:
            return
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
            step = self._push.agree()
            if step is None:
                continue
            if failpoints.armed:
                failpoints.hit("worker.staged")
            self._is_calling = True
            await self._carry_out(step)
            self._is_calling = False

    async def _carry_out(self, step: Commit | Choose | None) -> None:
        if isinstance(step, Choose):
            choice = await self._calls.choose(step.clock, step.sequence)
            step = self._push.chosen(choice)
        if step is not None and not self._is_answered:
            await all_or_none(
                self._calls.commit(shard_index, step.choice)
                for shard_index in range(self._push.shard_count)
            )


class PushCalls:
    """The calls of one push, and what is committed for it."""

    def __init__(
        self,
        reach: ShardReach,
        history: PushHistory,
        pushes: Sequence[OutgoingPush],
        receiver: Receiver,
        *,
        timeout_s: float,
        ahead: AheadCalls | None,
    ) -> None:
        """Makes no call yet.

        Args:
            reach: The shards.
            history: Records the push.
            pushes: Each shard's part.
            receiver: Takes the values and whom shards wait for.
            timeout_s: Longest time for all of it.
            ahead: Calls that have sent its chunks already, all but the trailer.
        """
        self._clients = reach.clients
        self._membership = reach.membership
        self._history = history
        self._pushes = pushes
        self._receiver = receiver
        self._timeout_s = timeout_s
        self._deadline = now() + timeout_s
        self._ahead = ahead
        header = pushes[0].header
        self._silence = ShardSilence(reach, header.clock, receiver.on_waiting)
        self._push = self._membership.core.open(
            header.sequence, [each.chunk_indexes for each in pushes]
        )
        self._commits = Commits(self._push, self)

    async def run(self, *, asks_first: bool) -> Sequence[PushReply]:
        """The answers of all shards.

        Args:
            asks_first: Whether shards may have some of it from another process.

        Raises:
            StepTimeoutError: It took too long; the text names who was waited for.
            PsError: A shard refused it, or the job can't go on.
        """
        work = self._commits.drive_until(
            all_or_none(
                self._answer_of(shard_index, self._push.begin(asks_first=asks_first))
                for shard_index in range(len(self._pushes))
            )
        )
        header = self._pushes[0].header
        try:
            with self._silence, self._history.push(header) as answered:
                return answered(await self._membership.unless_failed(work))
        except CallError as error:
            if not error.is_retryable:
                raise error.to_ps_error() from None
            raise StepTimeoutError(
                f"the step to clock {header.clock} was not complete within "
                f"{self._timeout_s:g} s: {self._silence.awaited(error)}; step() again "
                "goes on with the same push",
                reason=ErrorReason.WAIT_TIMEOUT,
            ) from None

    async def commit(self, shard_index: int, choice: ClockChoice) -> None:
        """Commits a clock on one shard.

        One that refuses, since its contributors are others, says `staged` again.
        """

        async def attempt(timeout_s: float) -> bool:
            client = await self._clients.of(shard_index)
            worker = self._membership.worker
            self._history.committed(worker, shard_index, choice.clock)
            return await client.commit(
                self._membership.generation, choice, timeout_s=timeout_s
            )

        await until_decided(attempt, self._deadline)

    async def choose(self, clock: int, sequence: int) -> ClockChoice:
        """Which pushes a clock consists of, as shard 0 says once it knows."""

        async def attempt(timeout_s: float) -> ClockChoice:
            client = await self._clients.of(0)
            return await client.ready(
                self._membership.generation, clock, sequence, timeout_s=timeout_s
            )

        return await until_decided(attempt, self._deadline)

    async def _answer_of(self, shard_index: int, step: Send | Ask) -> PushReply:
        def on_staged(choice: ClockChoice) -> None:
            self._clients.has_commits = True
            self._commits.take_staged(shard_index, choice)

        taken = Receiver(self._receiver.on_chunk, self._receiver.on_waiting, on_staged)
        receiver = self._silence.receiver(shard_index, taken)
        reply = await self._until_decided(shard_index, receiver, step)
        self._silence.answered(shard_index, reply.clock)
        if failpoints.armed:
            failpoints.hit("worker.push_answered")
        self._membership.core.check(shard_index, reply)
        return reply

    async def _until_decided(
        self, shard_index: int, receiver: Receiver, step: Send | Ask
    ) -> PushReply:
        """Carries out what one shard's part of the push needs, until it is answered."""
        ahead = self._ahead
        while True:
            if isinstance(step, Ask):
                if step.failure_count:
                    await pause(step.failure_count - 1)
                session = await self._session_of(shard_index)
                step = self._push.found(shard_index, session)
            try:
                if ahead is not None and ahead.is_open(shard_index):
                    call, ahead = ahead, None
                    return await call.complete(
                        shard_index, self._pushes, receiver, self._deadline
                    )
                return await self._send(shard_index, receiver, step)
            except CallError as error:
                self._silence.failed(shard_index, error)
                reason = error.refusal.reason if error.refusal is not None else None
                if error.refusal and reason == ErrorReason.SEGMENT_GONE:
                    await self._leave_segment(shard_index, error.refusal)
                asking = self._push.failed(
                    shard_index, reason, is_retryable=error.is_retryable
                )
                if asking is None or now() >= self._deadline:
                    raise
                step = asking

    async def _send(
        self, shard_index: int, receiver: Receiver, step: Send
    ) -> PushReply:
        """Sends one shard's part of the push, and waits for the answer."""
        push, held = self._pushes[shard_index], step.held
        client = await self._clients.of(shard_index)
        # Failpoints of sending are between the messages of a stream.
        at_once = step.is_first and not (self._clients.has_commits or failpoints.armed)
        goes_on = False
        if at_once and (whole := push.whole_message) is not None:
            reply = await client.push_pull_once(
                whole, receiver, timeout_s=left_s(self._deadline)
            )
            if reply is not None:
                return reply
            held, goes_on = push.chunk_indexes, True
        requests = (
            requests_with_failpoints(self._pushes, shard_index, held)
            if failpoints.armed
            else push.requests(held)
        )
        reply = await client.push_pull(
            requests, receiver, timeout_s=left_s(self._deadline)
        )
        return _as_of_one_call(reply) if goes_on else reply

    async def _leave_segment(self, shard_index: int, refusal: Refusal) -> None:
        """Sends chunks in messages to a shard that has not this worker's memory."""
        clients = self._clients
        segments = (await clients.of(shard_index)).segments
        assert segments is not None, "a chunk was said to be there"
        self._pushes[shard_index].in_message = segments.in_message
        if clients.segments.of(shard_index) is not None:
            clients.segments = clients.segments.without(shard_index)
            logger.warning(
                "tensors go over gRPC to shard %d from now on: %s",
                *(shard_index, refusal.message),
            )

    async def _session_of(self, shard_index: int) -> ShardSession:
        """What a shard has of this worker's pushes; asked until it answers."""

        async def attempt(timeout_s: float) -> ShardSession:
            client = await self._clients.of(shard_index)
            return await client.get_session(
                self._membership.worker, timeout_s=min(timeout_s, QUESTION_TIMEOUT_S)
            )

        return await until_decided(
            attempt,
            self._deadline,
            on_failure=partial(self._silence.failed, shard_index),
        )


def _as_of_one_call(reply: PushReply) -> PushReply:
    """What a push comes to that was sent once and asked for by a second call.

    It may have been done in between; nothing of it was sent again.
    """
    if reply.outcome is Outcome.DUPLICATE:
        return replace(reply, outcome=Outcome.APPLIED)
    return reply
