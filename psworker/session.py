"""A worker's part in a job: registered, watching, a member, gone.

On the event loop, but for the settings.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from typing import Final

from pswire.reasons import ErrorReason
from pswire.schema import ModelSchema, OptimizerSpec
from psworker.config import WorkerConfig
from psworker.errors import StartTimeoutError
from psworker.membership import Membership
from psworker.pending import DataRange
from psworker.retries import left_s, now, pause, told_to_users, until_decided
from psworker.shard_calls import ShardCalls
from psworker.transport.call_error import CallError
from psworker.transport.control_client import ControlClient
from psworker.transport.values import Identity, JobSettings, Member, SeedOrder
from psworker.waiting_log import WaitingLog

logger: Final = logging.getLogger("psworker")

LEAVE_TIMEOUT_S: Final = 10.0
"""Deadline of the leave: a script that is done does not wait longer."""

CALL_TIMEOUT_S: Final = 30.0
"""Deadline of a control call that waits for nobody but the coordinator."""


class Session:
    """One start of one worker.

    Attributes:
        control: Calls to the coordinator.
        worker: Which start of which worker.
        settings: Settings of the job.
        membership: What the coordinator has told.
        shards: Calls to the shards.
    """

    def __init__(
        self, control: ControlClient, worker: Identity, settings: JobSettings
    ) -> None:
        self.control = control
        self.worker = worker
        self.settings = settings
        self.membership = Membership(worker)
        self.shards = ShardCalls(settings.job_id, worker, self.membership)
        self._is_leaving = False
        self._watching = asyncio.ensure_future(self._watch())

    @classmethod
    async def open(cls, config: WorkerConfig, timeout_s: float) -> "Session":
        """Registers at the coordinator and begins to watch the job.

        Args:
            config: Where and as whom.
            timeout_s: What is left of the time to connect.

        Raises:
            CallError: There is no coordinator there, or it refused.
        """
        control = ControlClient(str(config.coordinator))
        process_id = uuid.uuid4().hex

        async def register(timeout_s: float) -> tuple[Identity, JobSettings]:
            return await control.register_worker(
                process_id, config.worker_id, timeout_s=timeout_s
            )

        try:
            return cls(control, *await until_decided(register, now() + timeout_s))
        except BaseException:
            await control.close()
            raise

    async def join(
        self,
        schema: ModelSchema,
        optimizers: Sequence[OptimizerSpec],
        loaders: Sequence[str],
    ) -> None:
        """Asks to become a member.

        Raises:
            SchemaMismatchError: The job trains another model.
            OptimizerMismatchError: The job uses another optimizer.
        """

        async def attempt(timeout_s: float) -> None:
            await self.control.join(
                self.worker, schema, optimizers, loaders, timeout_s=timeout_s
            )

        with told_to_users():
            await self.membership.unless_failed(
                until_decided(attempt, now() + CALL_TIMEOUT_S)
            )

    async def wait_start(
        self, done: SeedOrder | None, *, timeout_s: float
    ) -> SeedOrder | Member:
        """Returns this worker's place once it is a member, or an order to seed.

        Args:
            done: The order that this worker has carried out already.
            timeout_s: Longest wait.

        Raises:
            StartTimeoutError: Neither came; the text names who is missing.
        """
        deadline = now() + timeout_s
        log = WaitingLog()
        while True:
            if self.membership.member is not None:
                return self.membership.member
            if self.membership.seed_order not in (None, done):
                assert self.membership.seed_order is not None
                return self.membership.seed_order
            if now() >= deadline:
                raise StartTimeoutError(
                    f"the job did not start within {timeout_s:g} s: waiting for "
                    f"{self._missing()}; start what is missing",
                    reason=ErrorReason.NOT_STARTED,
                )
            pace_s = min(log.quiet_s, left_s(deadline))
            # Nothing new is worth saying too.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.membership.wait_change(), pace_s)
            log.remind(self._missing())

    async def leave(self, sequence: int, consumed: Sequence[DataRange]) -> None:
        """Ends the membership.

        Args:
            sequence: Last push that every shard has acknowledged.
            consumed: Acknowledged data that no report has carried.
        """
        self._is_leaving = True

        async def attempt(timeout_s: float) -> None:
            await self.control.leave(
                self.worker, sequence, consumed, timeout_s=timeout_s
            )

        with told_to_users():
            await until_decided(attempt, now() + LEAVE_TIMEOUT_S)

    async def close(self) -> None:
        """Ends all calls and channels. Without `leave`, the worker is evicted."""
        self._is_leaving = True
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self.shards.close()
        await self.control.close()

    def _missing(self) -> str:
        waiting = self.membership.waiting
        return str(waiting) if waiting else "the coordinator to start the job"

    async def _watch(self) -> None:
        """Keeps the watch open: it is the sign of life."""
        attempt = 0
        while not self._is_leaving:
            try:
                async for event in self.control.watch_worker(self.worker):
                    attempt = 0
                    if not self._is_leaving:
                        self.membership.take(event)
            except CallError as error:
                if error.is_decided and not error.is_retryable:
                    self.membership.fail(error.to_ps_error())
                    return
                if attempt == 0:
                    logger.warning(
                        "lost the watch of the job, opening it again: %s", error
                    )
            if self.membership.failure is not None:
                return
            await pause(attempt)
            attempt += 1
