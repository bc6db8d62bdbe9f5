"""Reports shards that a call waits for and that do not answer.

A shard that works reports whom it waits for. Calls to one that has ended, or is out of
reach, are made again silently: this reports them. On the event loop.
"""

import asyncio
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

from pswire.limits import WAITING_INTERVAL_MS
from pswire.membership import ClockChoice
from psworker.member.membership import Membership
from psworker.member.shard_reach import ShardReach
from psworker.transport.call_error import CallError
from psworker.transport.ports import Receiver
from psworker.transport.retries import now
from psworker.transport.shard_segments import SharedValues
from psworker.transport.values import Waiting

_NO_ANSWER = "gives no answer"


class ShardSilence:
    """When each shard was last heard of, during one call to all of them.

    A context manager: within it, silence of more than five seconds is reported, again
    every five seconds.
    """

    def __init__(
        self,
        membership: Membership,
        clock: int,
        on_waiting: Callable[[Waiting], None],
        reach: ShardReach,
    ) -> None:
        """Begins a wait for all shards.

        Args:
            membership: Has the shard map.
            clock: Clock that the calls are about.
            on_waiting: Takes whom the calls wait for.
            reach: Asks shards that are silent.
        """
        self._reach = reach
        self._asking: asyncio.Task[None] | None = None
        self._asked: dict[int, float] = {}  # when shards have answered a question
        self._told_silent: set[int] = set()
        self._membership = membership
        self._clock = clock
        self._on_waiting = on_waiting
        self._began = self._told = now()
        self._heard = dict.fromkeys(range(len(membership.shards)), self._began)
        self._trouble: dict[int, str] = {}  # what became of the last attempt
        self._last_told: Waiting | None = None  # by a shard
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._wait(min(WAITING_INTERVAL_MS / 1000, self._reach.pause_s))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def heard(self, shard_index: int) -> None:
        """A shard has said something, and is at work."""
        self._heard[shard_index] = now()
        self._trouble.pop(shard_index, None)

    def answered(self, shard_index: int) -> None:
        """A shard has done all that is wanted of it."""
        self._heard.pop(shard_index, None)
        self._trouble.pop(shard_index, None)
        if shard_index in self._told_silent:
            self._told_silent.discard(shard_index)
            self._reach.begin(self._reach.tell({shard_index: 0.0}))

    def failed(self, shard_index: int, error: CallError) -> None:
        """A call to a shard has failed, and is made again."""
        if error.refusal is not None:
            first_line = error.refusal.message.partition("\n")[0]
            self._trouble[shard_index] = f"refuses for now ({first_line})"
        elif error.code != "DEADLINE_EXCEEDED":
            # The end of a wait says nothing about whom it was for.
            self._trouble[shard_index] = _NO_ANSWER

    def receiver(self, shard_index: int, receiver: Receiver) -> Receiver:
        """A receiver of what one shard says, which is heard here too."""

        def on_chunk(message: memoryview | SharedValues) -> None:
            self.heard(shard_index)
            receiver.on_chunk(message)

        def on_staged(choice: ClockChoice) -> None:
            self.heard(shard_index)
            receiver.on_staged(choice)

        return Receiver(on_chunk, self.waiting_of(shard_index), on_staged)

    def waiting_of(self, shard_index: int) -> Callable[[Waiting], None]:
        """Takes whom one shard waits for. A silent shard is the better reason."""

        def on_waiting(waiting: Waiting) -> None:
            self._last_told = waiting
            self.heard(shard_index)
            self._on_waiting(self.waiting or waiting)

        return on_waiting

    @property
    def waiting(self) -> Waiting | None:
        """Which shards are silent by now, `None` when none is."""
        interval_s = WAITING_INTERVAL_MS / 1000
        silent = [
            f"shard {index} at {self._membership.shards[index].address or 'no address'}"
            f", which {self._trouble.get(index, _NO_ANSWER)}"
            for index, heard_s in self._heard.items()
            # A shard that works says so every interval: one that was late is not gone.
            if index in self._trouble or now() - heard_s >= 1.5 * interval_s
        ]
        if not silent:
            return None
        waited_ms = round(1000 * (now() - self._began))
        return Waiting(self._clock, waited_ms, ", and ".join(silent), ())

    @property
    def is_told_by_shards(self) -> bool:
        """Whether a shard has told whom it waits for, and none is silent."""
        return self._last_told is not None and self.waiting is None

    def awaited(self, error: CallError) -> str:
        """Who did not come, for the text of a time-out.

        Args:
            error: What the last attempt ended with.
        """
        if self.is_told_by_shards:
            return f"waiting for {self._last_told}"
        silent = self.waiting
        return f"waiting for {silent} ({error})" if silent else str(error)

    def _wait(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tell)

    def _tell(self) -> None:
        interval_s = WAITING_INTERVAL_MS / 1000
        waiting = self.waiting
        if waiting is not None and now() - self._told >= interval_s:
            self._told = now()
            self._on_waiting(waiting)
        silent = [i for i in self._heard if self._silence_s(i) >= self._reach.pause_s]
        if silent and (self._asking is None or self._asking.done()):
            self._asking = self._reach.begin(self._ask(silent))
        self._wait(min(interval_s / 5, self._reach.pause_s))

    async def _ask(self, shard_indexes: Collection[int]) -> None:
        """Asks shards whether they are there, and tells what came of it."""
        for index in await self._reach.answering(shard_indexes):
            self._asked[index] = now()
        silent_s = {index: self._silence_s(index) for index in self._heard}
        self._told_silent = {
            index for index, each in silent_s.items() if each >= self._reach.pause_s
        }
        await self._reach.tell(silent_s)

    def _silence_s(self, shard_index: int) -> float:
        heard_s = self._heard[shard_index]
        return now() - max(heard_s, self._asked.get(shard_index, heard_s))
