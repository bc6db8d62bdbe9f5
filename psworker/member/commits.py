"""The second phase of a two-phase step: this worker's part in committing a clock.

On the event loop. Shards tell `staged` on the streams of a push; a worker that has the
same from all of them tells all of them to commit, and by what to scale the gradient
when the job clips. Any contributor is enough, and a repeated commit changes nothing.
Whose drivers died is finished by a record.
Source: docs/decisions/0006.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from pswire import failpoints
from pswire.clipping import gradient_scale, norm_of, sum_of_parts
from pswire.membership import ClockChoice, WorkerKey
from psworker.member.interruption import Interruption
from psworker.transport.retries import all_or_none

T = TypeVar("T")

ANSWER_TIMEOUT_S: Final = 1.0
"""Longest wait for the answers to commits of a push that is answered itself."""


class CommitCalls(Protocol):
    """Calls that a commit needs; each returns when it is decided."""

    async def commit(self, shard_index: int, choice: ClockChoice) -> None:
        """Tells a shard to commit. It may refuse, and tells `staged` again then."""
        ...

    async def choose(self, clock: int, sequence: int) -> ClockChoice:
        """Tells shard 0 that a push is staged everywhere; who counts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlace:
    """The push that a commit is about.

    Attributes:
        worker: Whose.
        sequence: Its number.
        shard_count: Shards that it goes to.
        clip_grad_norm: Norm that the job clips gradients to, 0 for no clipping.
    """

    worker: WorkerKey
    sequence: int
    shard_count: int
    clip_grad_norm: float = 0.0


class Commits:
    """What shards have told of one push, and what follows."""

    def __init__(self, calls: CommitCalls, place: PushPlace) -> None:
        self._calls = calls
        self._place = place
        self._told: dict[int, ClockChoice] = {}
        self._agreed = asyncio.Event()
        self._driving: asyncio.Task[None] | None = None
        self._is_calling = False
        self._is_answered = False
        self._wait = Interruption()

    def take_staged(self, shard_index: int, choice: ClockChoice) -> None:
        """A shard has everything that it needs for a clock with these contributors."""
        self._told[shard_index] = choice
        if self._choice() is not None:
            self._agreed.set()
            self._begin_driving()

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

    def _begin_driving(self) -> None:
        """Most pushes are never staged, and are spared a task that waits for that."""
        if self._driving is None:
            self._driving = asyncio.ensure_future(self._drive())
            self._driving.add_done_callback(self._end_driving)

    def _end_driving(self, driving: "asyncio.Task[None]") -> None:
        if not driving.cancelled() and (error := driving.exception()) is not None:
            self._wait.interrupt(error)

    async def _drive(self) -> None:
        while not self._is_answered:
            await self._agreed.wait()
            self._agreed.clear()
            choice = self._choice()
            if choice is None:
                continue
            if failpoints.armed:
                failpoints.hit("worker.staged")
            self._is_calling = True
            await self._commit(choice)
            self._is_calling = False

    async def _commit(self, choice: ClockChoice) -> None:
        if not choice.workers:
            # With backup workers: told of this worker's own push alone.
            choice = await self._calls.choose(choice.clock, self._place.sequence)
        if self._place.worker in choice.workers and not self._is_answered:
            await all_or_none(
                self._calls.commit(shard_index, choice)
                for shard_index in range(self._place.shard_count)
            )

    def _choice(self) -> ClockChoice | None:
        """What all shards have told, once they have told the same.

        When the job clips, with the norm over all of them and what follows from it.
        """
        told = self._told
        if len(told) < self._place.shard_count:
            return None
        if len({(each.clock, each.workers) for each in told.values()}) > 1:
            return None
        # In the order of shards, as every driver does.
        total = sum_of_parts(told[index].sum_of_squares for index in sorted(told))
        scale = gradient_scale(norm_of(total), self._place.clip_grad_norm)
        return told[0]._replace(sum_of_squares=total, gradient_scale=scale)
