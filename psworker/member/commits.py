"""The second phase of a two-phase step: carries out the commits that a push needs.

On the event loop. What to commit is decided by `OpenPush`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, Protocol, TypeVar

from pswire import failpoints
from pswire.membership import ClockChoice
from psworker.member.core import Choose, Commit, OpenPush
from psworker.member.interruption import Interruption
from psworker.transport.retries import all_or_none

T = TypeVar("T")

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
    """The commits of one push."""

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
