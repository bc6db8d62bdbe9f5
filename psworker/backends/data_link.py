"""What leased loaders need of a connection.

Loaders exist before the worker has joined, since joining names them. They are iterated
after it.
"""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pswire.leased_data import DataReport, EpochShape, Origin
from pswire.membership import Mode
from psworker.data.pending import PendingData
from psworker.data.source import Lease, LeaseRequest, part_in_rounds
from psworker.event_loop import EventLoop, LoopFuture
from psworker.member.session import CALL_TIMEOUT_S, Session
from psworker.optim.optimizer import PreparedOptimizer
from psworker.steps.stepper import Stepper
from psworker.transport.retries import now, told_to_users, until_decided
from psworker.transport.waiting_log import saying_whom

T = TypeVar("T")


class DataLink:
    """A worker, as its loaders see it: a `psworker.data.DataSource`."""

    def __init__(
        self,
        loop: EventLoop,
        session: Session,
        pending: PendingData,
        *,
        wait_timeout_s: float,
    ) -> None:
        self._loop = loop
        self._session = session
        self._pending = pending
        self._wait_timeout_s = wait_timeout_s
        self._awaited_optimizer = ""
        self._optimizers: dict[str, PreparedOptimizer] = {}
        self._stepper: Stepper | None = None

    def start(self, stepper: Stepper, optimizers: dict[str, PreparedOptimizer]) -> None:
        """The worker is a member now, with these optimizers by name."""
        self._stepper = stepper
        self._optimizers = optimizers

    @property
    def pending(self) -> PendingData:
        """What was drawn and not yet pushed or reported."""
        return self._pending

    @property
    def rejoin_count(self) -> int:
        """How often this worker was evicted and has joined again."""
        assert self._stepper is not None, "loaders are handed out after joining"
        return self._stepper.rejoin_count

    @property
    def sharer_count(self) -> int:
        """Workers that take ranges on demand; 0 where ranges are dealt in rounds."""
        record = self._session.membership.record
        if record is None:
            return 0
        is_in_step = not self._session.settings.backup_worker_count
        if record.mode is Mode.BSP and is_in_step:
            return 0
        return len(record.members)

    @property
    def worker_count(self) -> int:
        """Workers of the job now, at least 1."""
        record = self._session.membership.record
        return max(1, len(record.members)) if record is not None else 1

    @property
    def rank(self) -> int:
        """This worker's place among these, from 0."""
        assert self._stepper is not None, "loaders are handed out after joining"
        return self._stepper.member.rank

    def dealt_count(self, batch_count: int) -> int:
        """Of the batches of an epoch those that this worker gets."""
        # Rounded up, what the first one gets.
        place = 0 if self.sharer_count else self.rank
        return part_in_rounds(batch_count, place, self.worker_count)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient was begun that no step has taken yet."""
        return self._stepper is not None and self._stepper.has_gradient

    def settle(self) -> None:
        """Completes a step that is under way."""
        self._member().settle()

    def rejoin(self) -> None:
        """Joins again after an eviction."""
        assert self._stepper is not None, "loaders are handed out after joining"
        self._stepper.rejoin()

    def open_epoch(
        self,
        loader: str,
        epoch: int,
        shape: EpochShape,
        origin: bytes,
        report: DataReport,
    ) -> LoopFuture[Origin]:
        """Opens an epoch; what its order is drawn from."""

        async def attempt(timeout_s: float) -> Origin:
            return await self._session.control.open_epoch(
                self._session.worker,
                loader,
                epoch,
                shape,
                origin,
                report,
                timeout_s=min(timeout_s, CALL_TIMEOUT_S),
            )

        return self._submit(attempt)

    def lease_data(self, request: LeaseRequest) -> LoopFuture[Lease]:
        """Leases ranges."""

        async def attempt(timeout_s: float) -> Lease:
            if request.wait:
                self._session.membership.waiting = None  # of an earlier wait
            ranges, is_closed, account = await self._session.control.lease_data(
                self._session.worker,
                request.loader,
                request.epoch,
                order_digest=request.order_digest,
                report=request.report,
                batch_count_max=request.batch_count_max,
                wait=request.wait,
                timeout_s=min(timeout_s, CALL_TIMEOUT_S),
            )
            return Lease(ranges, is_closed, account)

        # One that waits for other workers is spoken of by who asks.
        return self._submit(attempt, is_answered_at_once=not request.wait)

    def await_contribution(self) -> LoopFuture[None]:
        """Done once the next clock waits for nobody but workers without data."""
        place = self._member().next_place()

        async def wait() -> None:
            contribution = await self._session.shards.await_contribution(*place)
            self._awaited_optimizer = contribution.optimizer

        return self._loop.submit(wait())

    def holders(self) -> str:
        """Which workers have what this one waits for, in words, if that was told."""
        waiting = self._session.membership.waiting
        return waiting.reason if waiting is not None else ""

    def push_nothing(self) -> None:
        """Pushes weight 0 for the next clock and leaves the newest values."""
        named = self._optimizers.get(self._awaited_optimizer)
        optimizer = named or next(iter(self._optimizers.values()))
        optimizer.push_nothing()

    def _member(self) -> Stepper:
        assert self._stepper is not None, "loaders are handed out after joining"
        self._stepper.refuse_closed()
        self._stepper.refuse_lost()
        return self._stepper

    def _submit(
        self,
        attempt: Callable[[float], Coroutine[Any, Any, T]],
        *,
        is_answered_at_once: bool = True,
    ) -> LoopFuture[T]:
        self._member()

        async def call() -> T:
            def decided() -> Coroutine[Any, Any, T]:
                return until_decided(attempt, now() + self._wait_timeout_s)

            peer = self._session.control.peer
            with told_to_users():
                return await self._session.membership.unless_failed(
                    saying_whom(decided, f"{peer} to answer")
                    if is_answered_at_once
                    else decided()
                )

        return self._loop.submit(call())
