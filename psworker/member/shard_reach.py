"""Which shards answer one start of a worker, and who waits for those that do not.

A shard that works reports whom it waits for. Calls to one that has ended, or is out of
reach, are made again silently: that is reported from here. What one worker hears says
nothing about where the fault is: the coordinator knows what others hear, and decides.
On the event loop.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Self

from pswire.addresses import Address, parse_address
from pswire.limits import WAITING_INTERVAL_MS
from pswire.membership import ClockChoice
from pswire.security.certificates import certificates_of
from pswire.security.credentials import Credentials
from pswire.security.tls_problem import handshake_problem, is_cause
from psworker.member.membership import Membership
from psworker.transport.calls import CallError, now
from psworker.transport.ports import Receiver, ShardPort, Traffic
from psworker.transport.shard_client import ShardClient
from psworker.transport.shard_segments import NO_SEGMENTS, SharedValues
from psworker.transport.values import ShardAddress, Waiting

_NO_ANSWER = "gives no answer"

_CLOSED = ("Socket closed", "Connection reset")

_HANDSHAKE_TIMEOUT_S = 2.0
"""For each answer of a shard whose handshake is looked at."""

QUESTION_TIMEOUT_S = 10.0
"""Longest wait for what a shard knows of pushes."""

ReportSilence = Callable[[Mapping[int, int]], Coroutine[Any, Any, None]]
"""Reports to the coordinator for how many ms shards have been silent. May fail: the
watch says what that means."""


async def report_nothing(_: Mapping[int, int]) -> None:
    """For calls that stand for no member."""


class ShardClients:
    """Clients of one start of a worker, made when they are first needed.

    Attributes:
        membership: Who calls, and the shard map.
        traffic: Bytes of all messages.
        segments: Memory that it shares with shards.
        has_commits: Whether a push has waited for commits: they are streamed since.
    """

    def __init__(self, job_id: str, membership: Membership, traffic: Traffic) -> None:
        self._job_id = job_id
        self.membership = membership
        self.traffic = traffic
        self.segments = NO_SEGMENTS
        self.has_commits = False
        self._clients: dict[int, ShardPort] = {}

    async def of(self, shard_index: int) -> ShardPort:
        """The client of the start of a shard that the map names.

        Raises:
            CallError: It has no address yet; the same call may succeed later.
        """
        shard = self.membership.shards[shard_index]
        client = self._clients.get(shard_index)
        if client is not None and client.shard == shard:
            return client
        if not shard.address:
            raise CallError(
                f"shard {shard_index}",
                "UNAVAILABLE",
                "it has no address yet",
                refusal=None,
                decided=False,
            )
        worker = self.membership.worker
        new = ShardClient(shard, self._job_id, worker, self.traffic)
        self._clients[shard_index] = new
        if client is not None:
            if client.shard.incarnation == shard.incarnation:
                new.segments = client.segments  # the same process, elsewhere
            await client.close()
        return new

    async def close(self) -> None:
        """Ends the channels to all shards."""
        self.segments = NO_SEGMENTS
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*(client.close() for client in clients))


class ShardReach:
    """Which shards answer one start of a worker.

    Attributes:
        clients: Of the shards.
        membership: That start, the shard map, and why it may be evicted.
        answers: Of each shard, when it last answered a push or a pull, and its clock.
        pause_s: Silence after which a shard is asked, and time that it has to answer:
            half a lease, so that the coordinator knows after one.
    """

    def __init__(
        self,
        clients: ShardClients,
        report: ReportSilence,
        *,
        lease_s: float,
    ) -> None:
        """Asks nobody yet.

        Args:
            clients: Of the shards.
            report: Reports to the coordinator.
            lease_s: Silence after which a shard counts as out of reach.
        """
        self.pause_s = lease_s / 2
        self.clients = clients
        self.membership = clients.membership
        self.answers: dict[int, tuple[float, int]] = {}
        self._report_to_coordinator = report
        self._lease_s = lease_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._problems: dict[int, str] = {}
        self._looking: set[int] = set()
        self._watching: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Starts work that nobody waits for."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Ends all work."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def watch(self) -> None:
        """Asks all shards now and then, and reports how long each is silent.

        Also of those that answer: only so is it known that another worker can't reach
        what this one can. For workers that wait to become members.
        """
        assert self._watching is None
        self._watching = self.begin(self._watch())

    async def end_watch(self) -> None:
        """Asks no more: a member's calls report silence themselves."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
            self.membership.unreached = ""

    async def answering(self, shard_indexes: Collection[int]) -> set[int]:
        """Those of some shards that answer in time, be it by a refusal."""
        indexes = sorted(shard_indexes)
        answers = await asyncio.gather(*map(self._answers, indexes))
        return {
            index for index, is_there in zip(indexes, answers, strict=True) if is_there
        }

    async def report(self, silent_s: Mapping[int, float]) -> None:
        """Reports to the coordinator for how long shards have been silent."""
        out_of_reach = [
            f"shard {index} at {self.membership.shards[index].address}"
            for index, silence_s in sorted(silent_s.items())
            if silence_s >= self._lease_s
        ]
        self.membership.unreached = " and ".join(out_of_reach)
        try:
            await self._report_to_coordinator(
                {index: round(1000 * each) for index, each in silent_s.items()}
            )
        except CallError:
            return  # it is reported again, and the watch says what is wrong

    async def unreached(self, began: float) -> str:
        """What to wait for, in words, while some shard gives no answer; else empty.

        Args:
            began: Since when they are asked, for the coordinator.
        """
        shards = self.membership.shards
        there = await self.answering(range(len(shards)))
        silent = [index for index in range(len(shards)) if index not in there]
        if silent:
            await self.report(dict.fromkeys(silent, now() - began))
        names = (
            f"shard {i} at {shards[i].address or 'no address'}{self.problem_of(i)}"
            for i in silent
        )
        return f"an answer from {' and '.join(names)}" if silent else ""

    def problem_of(self, shard_index: int) -> str:
        """Why a shard gave no answer, in parentheses; empty if that is not known."""
        problem = self._problems.get(shard_index)
        return f" ({problem})" if problem else ""

    async def _watch(self) -> None:
        began = asked = now()
        answered: dict[int, float] = {}
        while True:
            await asyncio.sleep(max(0.0, asked + self.pause_s - now()))
            asked = now()
            shards = self.membership.shards
            known = [index for index, each in enumerate(shards) if each.address]
            if not known:
                continue
            for index in await self.answering(known):
                answered[index] = now()
            await self.report({i: now() - answered.get(i, began) for i in known})

    async def _answers(self, shard_index: int) -> bool:
        try:
            client = await self.clients.of(shard_index)
            await client.get_session(self.membership.worker, timeout_s=self.pause_s)
        except CallError as error:
            if error.refusal is None:
                self.look_behind(shard_index, error)
                return False
        self._problems.pop(shard_index, None)
        return True

    def look_behind(self, shard_index: int, error: CallError) -> None:
        """Finds out, beside all else, whether TLS is why a call to a shard failed."""
        if is_cause(error.text):
            self._problems[shard_index] = error.text
        # All that gRPC says of a server that has refused this process's certificate.
        is_closed = any(each in error.text for each in _CLOSED)
        if is_closed and shard_index not in self._looking:
            self._looking.add(shard_index)
            address = parse_address(self.membership.shards[shard_index].address)
            self.begin(self._look_behind(shard_index, address))

    async def _look_behind(self, shard_index: int, address: Address) -> None:
        try:
            own = certificates_of(Credentials.from_environment())
            problem = await asyncio.to_thread(
                handshake_problem, address, own, _HANDSHAKE_TIMEOUT_S
            )
            if problem:
                self._problems[shard_index] = problem
        finally:
            self._looking.discard(shard_index)


class ShardSilence:
    """When each shard was last heard of, during one call to all of them.

    A context manager: within it, silence of more than five seconds is reported, again
    every five seconds.
    """

    def __init__(
        self,
        reach: ShardReach,
        clock: int,
        on_waiting: Callable[[Waiting], None],
    ) -> None:
        """Begins a wait for all shards.

        Args:
            reach: Asks shards that are silent.
            clock: Clock that the calls are about.
            on_waiting: Takes whom the calls wait for.
        """
        self._reach = reach
        self._asking: asyncio.Task[None] | None = None
        self._asked: dict[int, float] = {}  # when shards have answered a question
        self._reported_silent: set[int] = set()
        self._clock = clock
        self._on_waiting = on_waiting
        self._began = self._noted = self._reported = now()
        self._heard = dict.fromkeys(range(len(self._shards)), self._began)
        self._trouble: dict[int, str] = {}  # what became of the last attempt
        self._last_said: Waiting | None = None  # by a shard
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def heard(self, shard_index: int) -> None:
        """A shard has said something, and is at work."""
        self._heard[shard_index] = now()
        self._trouble.pop(shard_index, None)

    def answered(self, shard_index: int, clock: int | None = None) -> None:
        """A shard has done all that is wanted of it, and is at a clock, if it says."""
        if clock is not None:
            self._reach.answers[shard_index] = (now(), clock)
        self._heard.pop(shard_index, None)
        self._trouble.pop(shard_index, None)
        if shard_index in self._reported_silent:
            self._reported_silent.discard(shard_index)
            self._reach.begin(self._reach.report({shard_index: 0.0}))

    def failed(self, shard_index: int, error: CallError) -> None:
        """A call to a shard has failed, and is made again."""
        if error.refusal is not None:
            first_line = error.refusal.message.partition("\n")[0]
            self._trouble[shard_index] = f"refuses for now ({first_line})"
        elif error.code != "DEADLINE_EXCEEDED":
            # The end of a wait says nothing about whom it was for.
            self._trouble[shard_index] = _NO_ANSWER
            self._reach.look_behind(shard_index, error)

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
            self._last_said = waiting
            self.heard(shard_index)
            self._on_waiting(self.waiting or waiting)

        return on_waiting

    @property
    def _shards(self) -> tuple[ShardAddress, ...]:
        return self._reach.membership.shards

    @property
    def waiting(self) -> Waiting | None:
        """Which shards are silent by now, `None` when none is."""
        interval_s = WAITING_INTERVAL_MS / 1000
        silent = [
            f"shard {index} at {self._shards[index].address or 'no address'}"
            f", which {self._trouble.get(index, _NO_ANSWER)}"
            f"{self._reach.problem_of(index)}"
            for index, heard_s in self._heard.items()
            # A shard that works says so every interval: one that is late has not ended.
            if index in self._trouble or now() - heard_s >= 1.5 * interval_s
        ]
        if not silent:
            return None
        waited_ms = round(1000 * (now() - self._began))
        return Waiting(self._clock, waited_ms, ", and ".join(silent), ())

    def awaited(self, error: CallError) -> str:
        """Who did not come, with what is known of it, for the text of a time-out.

        Args:
            error: What the last attempt ended with.
        """
        silent = self.waiting
        if self._last_said is not None and silent is None:
            return f"waiting for {self._last_said}"
        text = f"waiting for {silent} ({error})" if silent else str(error)
        known = [
            f"shard {index} at clock {clock} {now() - at_s:.0f} s ago"
            for index, (at_s, clock) in sorted(self._reach.answers.items())
        ]
        return f"{text} (last answers: {', '.join(known)})" if known else text

    def _wait(self) -> None:
        delay_s = min(WAITING_INTERVAL_MS / 1000 / 5, self._reach.pause_s / 2)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        waiting = self.waiting
        if waiting is not None and now() - self._noted >= WAITING_INTERVAL_MS / 1000:
            self._noted = now()
            self._on_waiting(waiting)
        is_idle = self._asking is None or self._asking.done()
        if is_idle and now() - self._reported >= self._reach.pause_s:
            # Also where no shard is silent: only so is it known that another worker
            # can't reach what this one can.
            self._reported = now()
            pause_s = self._reach.pause_s / 2
            silent = [i for i in self._heard if self._silence_s(i) >= pause_s]
            self._asking = self._reach.begin(self._ask(silent))
        self._wait()

    async def _ask(self, shard_indexes: Collection[int]) -> None:
        """Asks shards whether they are there, and reports of all that are awaited."""
        for index in await self._reach.answering(shard_indexes):
            self._asked[index] = now()
        silent_s = {index: self._silence_s(index) for index in self._heard}
        self._reported_silent = {
            index for index, each in silent_s.items() if each >= self._reach.pause_s
        }
        await self._reach.report(silent_s)

    def _silence_s(self, shard_index: int) -> float:
        heard_s = self._heard[shard_index]
        return now() - max(heard_s, self._asked.get(shard_index, heard_s))
