"""What the coordinator has sent this worker about the job.

Lives on the event loop; only its watch changes it. Waits end when something changes,
and everything that waits for the job ends when the job can't go on for this worker.
"""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

from pswire.membership import Member, Record, WorkerKey
from psworker.errors import (
    EvictedError,
    JobEndedError,
    JobFailedError,
    PsError,
    StalenessError,
)
from psworker.member.core import MemberCore
from psworker.transport.values import (
    FirstValues,
    JobEnd,
    SeedOrder,
    ShardAddress,
    ShardMap,
    Waiting,
    WatchEvent,
    WorkerView,
)

T = TypeVar("T")

logger: Final = logging.getLogger("psworker")


class Interruption:
    """One wait of one task, which something else may end with an error.

    As `asyncio.timeout` does it, without a second task: the task that awaits is
    cancelled, and that is turned into the error where it was awaited.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: BaseException | None = None

    def interrupt(self, error: BaseException) -> None:
        """Ends the wait, if it has not ended; the first error stands.

        Args:
            error: What is raised where it was awaited.
        """
        if self._task is None or self._error is not None:
            return
        self._error = error
        # What runs in the task itself is not to be cancelled: it is about to end.
        if self._task is not asyncio.current_task():
            self._task.cancel()

    async def of(self, work: Awaitable[T]) -> T:
        """The result of `work`, unless it is interrupted before.

        Raises:
            BaseException: What it was interrupted with, even when `work` failed for a
                reason of its own then.
        """
        task = self._task = asyncio.current_task()
        assert task is not None, "only tasks wait"
        cancelled_count = task.cancelling()
        try:
            return await work
        except BaseException:
            if self._error is None:
                raise
            if task.cancelling() > cancelled_count and (
                task.uncancel() > cancelled_count
            ):
                raise  # by somebody else, too
            raise self._error from None
        finally:
            self._task = None


class Membership:
    """The job as this worker sees it.

    Attributes:
        worker: Which start of which worker.
        core: What this worker decides in the protocol.
        shards: The shard map; some may have no address yet.
        waiting: Whom the start, or a member without data, waits for, as last heard.
        first_values: What the job has started with, if that is known.
        failure: Why this worker can't go on, `None` while it can.
        makes_checkpoints: Whether the job makes any.
        unreached: Shards that have not answered this worker for a lease, in words.
    """

    def __init__(self, worker: WorkerKey) -> None:
        self.worker = worker
        self.core = MemberCore(worker)
        self._changed = asyncio.Event()
        self._waits: set[Interruption] = set()
        self._logged: set[WorkerKey] = set()
        self.shards: tuple[ShardAddress, ...] = ()
        self.waiting: Waiting | None = None
        self.first_values: FirstValues | None = None
        self.failure: PsError | None = None
        self.makes_checkpoints = False
        self.unreached = ""

    @property
    def record(self) -> Record | None:
        """Newest record, `None` before the start."""
        return self.core.record

    @property
    def member(self) -> Member | None:
        """This worker's place in the newest record."""
        return self.core.member

    @property
    def generation(self) -> int:
        """That of the newest record, 0 before the start."""
        return self.core.generation

    @property
    def eviction_cause(self) -> str:
        """Why this worker is evicted, if it is, as far as is known here."""
        if self.failure is not None and self.failure.facts.get("cause"):
            return self.failure.facts["cause"]
        if self.unreached:
            return f"it gets no answer from {self.unreached}, and others do"
        return "the coordinator had no sign of life from it for a lease"

    def take(self, event: WatchEvent) -> None:
        """Takes an event of the watch."""
        match event:
            case WorkerView(record=record, shards=shards, first_values=first):
                self.makes_checkpoints = event.makes_checkpoints
                self.core.view_count += 1
                self.shards = shards
                self.first_values = first or self.first_values
                if record is not None:
                    self._take_record(record)
                elif self.member is None:
                    # The job has returned to a checkpoint, and starts again.
                    self.core.record = None
            case SeedOrder():
                self.core.order = event
                self.shards = event.shards
            case ShardMap(shards=shards):
                self.shards = shards
                self.core.order = None  # another worker seeds
            case Record():
                self._take_record(event)
            case Waiting():
                self.waiting = event
            case JobEnd(failed=failed, reason=reason):
                if failed and self.failure is None:
                    logger.error("the job has failed, nobody can go on: %s", reason)
                self.fail(
                    JobFailedError(
                        f"the job failed: {reason}; look into the logs of coordinator "
                        f"and shards, and {self._new_start}"
                    )
                    if failed
                    else JobEndedError(f"the job is over: {reason or 'it finished'}")
                )
        self._changed.set()
        self._changed = asyncio.Event()

    def fail(self, error: PsError) -> None:
        """Ends every wait, now and later, with an error. The first one stands."""
        if self.failure is None:
            self.failure = error
            for wait in self._waits:
                wait.interrupt(_again(error))

    def wait_change(self) -> Coroutine[Any, Any, bool]:
        """Returns after the next event that follows this call.

        Not a coroutine function: one that is made a task runs later, and would miss
        what comes before it does.
        """
        return self.unless_failed(self._changed.wait())

    async def wait_generation(self, generation: int) -> None:
        """Returns once the newest record is of this generation or a newer one."""
        while self.generation < generation:
            await self.wait_change()

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless this worker can't go on before.

        Raises:
            PsError: `failure`, even when `work` failed for a reason of its own then.
            StalenessError: `work` has found that a promise was broken. This worker
                can't go on from then.
        """
        wait = Interruption()
        self._waits.add(wait)
        if self.failure is not None:
            # Not before it has begun: what it is made of may be work itself.
            loop = asyncio.get_running_loop()
            loop.call_soon(wait.interrupt, _again(self.failure))
        try:
            return await wait.of(work)
        except StalenessError as error:
            self.fail(error)
            raise
        finally:
            self._waits.discard(wait)

    @property
    def _new_start(self) -> str:
        if self.makes_checkpoints:
            return (
                "start all again by the same command lines: the job goes on from its "
                "newest checkpoint, if it has one"
            )
        return "start new ones with other --state-dir folders"

    def _take_record(self, record: Record) -> None:
        was_member = self.member is not None
        evicted = self.core.take_record(record)
        if self.record is not record:
            return
        self.waiting = None
        self._log_lost(record, was_member=was_member)
        if evicted is not None:
            last = evicted.last_clock
            clock = f" after clock {last}" if last is not None else ""
            self.fail(
                EvictedError(
                    f"worker {self.worker.worker_id} is no member of the job any more"
                    f"{clock}: {self.eviction_cause}; connect again to take part"
                )
            )

    def _log_lost(self, record: Record, *, was_member: bool) -> None:
        """Says once which others were lost while this worker was a member."""
        lost = [
            end
            for end in record.departures
            if end.evicted and end.member.worker not in self._logged | {self.worker}
        ]
        self._logged.update(end.member.worker for end in lost)
        if not was_member or self.member is None:
            return
        count = len(record.members)
        for end in lost:
            others = f"the {count} workers left" if count > 1 else "this worker alone"
            logger.warning(
                "worker %s (start %d) was lost after clock %d: the job goes on with %s "
                "in generation %d",
                end.member.worker.worker_id,
                end.member.worker.incarnation,
                end.last_clock,
                others,
                record.generation,
            )


def _again(error: PsError) -> PsError:
    """The same error, for one more wait: a raised one has the traceback of its own."""
    return type(error)(*error.args, reason=error.reason, facts=error.facts)
