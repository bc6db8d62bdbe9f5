"""Calls of workers that have no data and wait until a clock waits only for them."""

import asyncio

from psserver.shard.core.effects import ContributionAwaited
from pswire.membership import Record, WorkerKey
from pswire.reasons import ErrorReason, Refusal


class IdleWorkers:
    """At most one call of each worker."""

    def __init__(self) -> None:
        self._calls: dict[WorkerKey, asyncio.Future[ContributionAwaited]] = {}

    def __contains__(self, worker: WorkerKey) -> bool:
        return worker in self._calls

    def open(self, worker: WorkerKey) -> "asyncio.Future[ContributionAwaited]":
        """Takes a call in; one that was there before is ended."""
        self._fail(
            worker,
            Refusal(ErrorReason.DRAINING, "a newer call asks for the same worker"),
        )
        loop = asyncio.get_running_loop()
        call: asyncio.Future[ContributionAwaited] = loop.create_future()
        self._calls[worker] = call
        return call

    def close(
        self, worker: WorkerKey, call: "asyncio.Future[ContributionAwaited]"
    ) -> bool:
        """The call has ended; returns whether it was the worker's newest."""
        is_newest = self._calls.get(worker) is call
        if is_newest:
            del self._calls[worker]
        return is_newest

    def answer(self, awaited: ContributionAwaited) -> None:
        """The clock waits for this worker."""
        call = self._calls.get(awaited.worker)
        if call is not None and not call.done():
            call.set_result(awaited)

    def end_departed(self, record: Record) -> None:
        """Ends the calls of those that are no members any more."""
        for worker in self._calls:
            if record.member_of(worker) is None:
                self._fail(
                    worker,
                    Refusal(
                        ErrorReason.WORKER_INCARNATION_STALE,
                        f"{worker} is no member of generation {record.generation}",
                    ),
                )

    def end_all(self, refusal: Refusal) -> None:
        """Ends every call with an error."""
        for worker in self._calls:
            self._fail(worker, refusal)

    def _fail(self, worker: WorkerKey, refusal: Refusal) -> None:
        call = self._calls.get(worker)
        if call is not None and not call.done():
            call.set_exception(refusal)
