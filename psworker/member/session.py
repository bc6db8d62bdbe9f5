"""A worker's part in a job: registered, watching, a member, no member any more.

On the event loop, but for the settings.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from pswire.compression import NO_COMPRESSION
from pswire.job_settings import JobSettings
from pswire.job_terms import JobTerms
from pswire.leased_data import DataReport, RecordedSplit
from pswire.logs import know
from pswire.membership import WorkerKey
from pswire.placement import Placement
from pswire.reasons import ErrorReason
from pswire.schema import OptimizerSpec
from psworker.config import WorkerConfig
from psworker.errors import (
    EvictedError,
    JobEndedError,
    StartTimeoutError,
)
from psworker.member.core import Begin, Join, Seed
from psworker.member.membership import Membership
from psworker.member.push_history import PushHistory
from psworker.member.registration import register, taken_by
from psworker.member.script_state import Rewinds, ScriptState
from psworker.member.shard_calls import ShardCalls
from psworker.transport.calls import (
    CallError,
    left_s,
    now,
    pause,
    told_to_users,
    until_decided,
)
from psworker.transport.control_client import ControlClient
from psworker.transport.ports import CoordinatorPort
from psworker.transport.values import (
    JoinAnswer,
    SeedOrder,
    StateWanted,
    WorkDone,
)
from psworker.transport.waiting_log import WaitingLog
from psworker.work_log import WorkLog

logger: Final = logging.getLogger("psworker")

LEAVE_TIMEOUT_S: Final = 10.0
"""Deadline of the leave: a script that is done does not wait longer."""

GONE_TIMEOUT_S: Final = 3.0
"""How long a coordinator may have been silent for the leave to try again: longer than
the blink of a connection, as short as a person waits for a script that is done."""

WATCH_END_TIMEOUT_S: Final = 1.0
"""Longest wait for the coordinator to end the watch of a worker that is out of the job,
before it is cancelled here: it does so as soon as it has sent the worker why."""

SHARING_TIMEOUT_S: Final = 5.0
"""Longest wait for shards to say whether they share memory: they go on without."""

_SHARD_ATTEMPT: Final = 5
"""The pause between two questions whether shards are there: a second."""

STATE_TIMEOUT_S: Final = 5.0
"""Longest time to send registered state: a checkpoint without it is good, too."""

WORK_INTERVAL_S: Final = 2.0
"""Between two reports of what the script does: for people, who look every second."""

WORK_TIMEOUT_S: Final = 1.0
"""Deadline of such a report. The next one says more."""

CALL_TIMEOUT_S: Final = 30.0
"""Deadline of a control call that waits for nobody but the coordinator."""


class Session:
    """One start of one worker, and after an eviction the next one.

    Attributes:
        control: Calls to the coordinator.
        worker: Which start of which worker.
        settings: Settings of the job.
        membership: What the coordinator has sent.
        core: What this start of the worker decides in the protocol.
        shards: Calls to the shards.
        script_state: What the script has registered.
        rewinds: What is set back when the job returns to a checkpoint.
        work: What the script does, for reports.
    """

    def __init__(
        self,
        control: CoordinatorPort,
        worker: WorkerKey,
        settings: JobSettings,
        *,
        history: str = "",
        shares_memory: bool = True,
        process_id: str = "",
        work: WorkLog | None = None,
    ) -> None:
        """Begins to watch the job.

        Args:
            control: Calls to the coordinator.
            worker: Which start of which worker.
            settings: Settings of the job.
            history: Where histories go, empty for nowhere.
            shares_memory: Whether tensors go through shared memory where they can.
            process_id: Of a worker that several processes are, one after the other.
            work: What the script does; by default one that begins now.
        """
        self._process_id = process_id
        self.work = work or WorkLog()
        self._compression = NO_COMPRESSION
        self._shares_memory = shares_memory
        self.control = control
        self.worker = worker
        self.settings = settings
        know(job=settings.job_id)
        self.membership = Membership(worker)
        self.core = self.membership.core
        self._wanted_history = history
        self._history = self._opened_history()
        self.shards = ShardCalls(
            settings.job_id,
            self.membership,
            history=self._history,
            report_silence=self._report_silence,
            lease_s=settings.lease_ttl_ms / 1000,
        )
        self._is_leaving = False
        self._has_left = False
        self._silent_since: float | None = None
        self.script_state = ScriptState(self.membership)
        self.rewinds = Rewinds(self.script_state)
        self._answering: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._watching = asyncio.ensure_future(self._watch())
        self._reporting = asyncio.ensure_future(self._report_work())

    @classmethod
    async def open(
        cls,
        config: WorkerConfig,
        timeout_s: float,
        *,
        process_id: str = "",
        work: WorkLog | None = None,
    ) -> "Session":
        """Registers at the coordinator and begins to watch the job.

        Args:
            config: Where and as whom.
            timeout_s: What is left of the time to connect.
            process_id: Of a worker that several processes are, one after the other:
                who names it is the same start of the worker, as long as that lives.
            work: What the script does.

        Raises:
            CallError: There is no coordinator there, or it refused.
        """
        control = ControlClient(str(config.coordinator))
        try:
            registered = await register(
                control,
                config.worker_id,
                timeout_s=timeout_s,
                process_id=process_id,
            )
            return cls(
                control,
                *registered,
                history=config.history,
                shares_memory=config.shares_memory,
                process_id=process_id,
                work=work,
            )
        except BaseException:
            await control.close()
            raise

    async def renew(self, timeout_s: float) -> None:
        """Registers again under the same id, as a new start of the worker.

        Raises:
            EvictedError: Another process has this worker's place by now.
            JobEndedError: The coordinator serves another job by now.
            CallError: The coordinator was not reached, or it refused.
        """
        worker_id = self.worker.worker_id
        await self._end_watch(is_out=True)
        try:
            worker, settings = await register(
                self.control,
                worker_id,
                timeout_s=timeout_s,
                waits_for_holder=False,
                process_id=self._process_id,
            )
        except CallError as error:
            if not (holder := taken_by(error)):
                raise
            raise EvictedError(
                f"worker {worker_id} was evicted, and a replacement has its place: "
                f"{holder}; end this process, or connect under another worker id"
            ) from None
        if settings.job_id != self.settings.job_id:
            raise JobEndedError(
                f"the job {self.settings.job_id} is over: {self.control.peer} serves "
                f"job {settings.job_id} now; connect again to take part in that one"
            )
        traffic = self.shards.traffic
        await self.shards.close()
        self._history.close()
        self.worker = worker
        self.work.restart()
        self._history = self._opened_history()
        self.membership = Membership(worker)
        self.core = self.membership.core
        self.script_state.begin(self.membership)
        self.shards = ShardCalls(
            settings.job_id,
            self.membership,
            traffic=traffic,
            history=self._history,
            report_silence=self._report_silence,
            lease_s=settings.lease_ttl_ms / 1000,
        )
        self._watching = asyncio.ensure_future(self._watch())

    async def join(
        self,
        terms: JobTerms,
        loaders: Sequence[str],
        *,
        values_digest: int = 0,
        state_digest: int = 0,
    ) -> JoinAnswer:
        """Asks to become a member.

        Raises:
            SchemaMismatchError: The job trains another model.
            OptimizerMismatchError: The job uses another optimizer.
        """

        async def attempt(timeout_s: float) -> JoinAnswer:
            return await self.control.join(
                self.worker,
                terms,
                loaders,
                values_digest=values_digest,
                state_digest=state_digest,
                timeout_s=timeout_s,
            )

        self.core.update = self.settings.update_rules(terms.clip_grad_norm)
        self._compression = terms.compression
        with told_to_users():
            return await self.membership.unless_failed(
                until_decided(attempt, now() + CALL_TIMEOUT_S)
            )

    async def save_state(self, snapshot_id: int, state: bytes) -> None:
        """Sends what the script has registered; what goes wrong is only logged.

        Args:
            snapshot_id: The cut that it is as of; 0 for no cut, where it only says
                that there is something, or that this worker leaves after its last push.
            state: What it has registered; empty for none.
        """
        try:
            await until_decided(
                lambda timeout_s: self.control.save_state(
                    self.worker, snapshot_id, state, timeout_s=timeout_s
                ),
                now() + STATE_TIMEOUT_S,
            )
        except CallError as error:
            logger.warning(
                "what was registered with ps.register_state may be missing in "
                "checkpoints: %s",
                error,
            )

    async def announce_state(self) -> None:
        """Says that there is registered state, if checkpoints take any."""
        if self.script_state.is_sent:
            await self.save_state(0, b"")

    async def load_state(self, checkpoint: str) -> bytes:
        """What scripts have registered, as a checkpoint has it.

        Raises:
            SnapshotError: It can't be read.
        """

        async def attempt(timeout_s: float) -> bytes:
            return await self.control.load_state(
                self.worker, checkpoint, timeout_s=timeout_s
            )

        with told_to_users():
            return await self.membership.unless_failed(
                until_decided(attempt, now() + CALL_TIMEOUT_S)
            )

    async def end_state(self, state: bytes) -> None:
        """Sends what checkpoints still want of a script that is done, and its end."""
        if self._answering is not None:
            await self._answering
        if state:
            await self.save_state(0, state)

    async def record_split(self, split: RecordedSplit) -> RecordedSplit:
        """Records a split; the one that then has its name."""

        async def attempt(timeout_s: float) -> RecordedSplit:
            return await self.control.record_split(
                self.worker, split, timeout_s=timeout_s
            )

        with told_to_users():
            return await self.membership.unless_failed(
                until_decided(attempt, now() + CALL_TIMEOUT_S)
            )

    async def declare_optimizer(self, spec: OptimizerSpec) -> None:
        """Declares to the job that an optimizer has other groups, or is another one.

        Raises:
            OptimizerMismatchError: The job has no such optimizer.
            LimitError: Too much was declared already.
        """

        async def attempt(timeout_s: float) -> None:
            await self.control.declare_optimizer(self.worker, spec, timeout_s=timeout_s)

        with told_to_users():
            await self.membership.unless_failed(
                until_decided(attempt, now() + CALL_TIMEOUT_S)
            )

    async def wait_step(
        self, log: WaitingLog, *, timeout_s: float
    ) -> Join | Seed | Begin:
        """What this worker does next to become a member, once there is something.

        Args:
            log: Says whom it waits for.
            timeout_s: Longest wait.

        Raises:
            StartTimeoutError: There was nothing; the text names who is missing.
        """
        deadline = now() + timeout_s
        while (step := self.core.next_to_join()) is None:
            if now() >= deadline:
                what = (
                    "the job did not start"
                    if self.membership.record is None
                    else "this worker was not taken into the job"
                )
                raise StartTimeoutError(
                    f"{what} within {round(timeout_s, 1):g} s: waiting for "
                    f"{self.missing}; start what is missing",
                    reason=ErrorReason.NOT_STARTED,
                )
            pace_s = max(0.01, min(log.quiet_s, left_s(deadline)))
            # Nothing new is worth saying too.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.membership.wait_change(), pace_s)
            waiting = self.membership.waiting
            job_waited_s = waiting.waited_ms / 1000 if waiting else 0
            log.remind(self.missing, job_waited_s=job_waited_s)
        return step

    async def seed(
        self,
        order: SeedOrder,
        chunks_of: Callable[[int], Iterable[bytes]],
        *,
        timeout_s: float,
    ) -> None:
        """Stages first values on every shard, for as long as the order stands.

        Once it is over this worker's values are not wanted any more: it did not reach a
        shard, and the job has started, or starts, with others.

        Args:
            order: The coordinator's order.
            chunks_of: The `SeedRequest`s of a shard.
            timeout_s: Longest time for all of it.

        Raises:
            CallError: A shard did not take them; the next order may go better.
        """
        log = WaitingLog()
        seeding = self.shards.reach.begin(
            self.shards.seed(order, chunks_of, timeout_s=timeout_s)
        )
        try:
            while not seeding.done() and not self.core.is_over(order):
                change = asyncio.ensure_future(self.membership.wait_change())
                await asyncio.wait(
                    (seeding, change),
                    timeout=max(log.quiet_s, self.shards.reach.pause_s / 5),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                change.cancel()
                await asyncio.gather(change, return_exceptions=True)
                if self.membership.unreached:
                    log.remind(self.missing)
            if seeding.done():
                await seeding
                self.core.seeded(order)
        finally:
            seeding.cancel()
            await asyncio.gather(seeding, return_exceptions=True)

    async def wait_shards(self, *, timeout_s: float) -> None:
        """Returns once every shard of a job that trains answers this worker.

        As a member without one of them it would only hold up the others. Before the
        start there is nobody to hold up, and shards may still be missing.

        Raises:
            StartTimeoutError: One does not; the text names it.
        """
        began, log = now(), WaitingLog()
        while not self.core.view_count:
            await self.membership.wait_change()
        # None also once the job has returned to a checkpoint meanwhile.
        while self.membership.record is not None:
            silent = await self.shards.reach.unreached(began)
            if not silent:
                return
            if now() >= began + timeout_s:
                raise StartTimeoutError(
                    f"this worker could not ask to join within {timeout_s:g} s: "
                    f"waiting for {silent}; look at the network between this machine "
                    "and it",
                    reason=ErrorReason.NOT_STARTED,
                )
            log.remind(silent)
            await pause(_SHARD_ATTEMPT)

    async def share_memory(self, placement: Placement) -> None:
        """As a member: shares memory with the shards that are on this machine.

        Raises:
            PsError: The job can't go on.
        """
        await self.shards.open_segments(
            placement, is_wanted=self._shares_memory, timeout_s=SHARING_TIMEOUT_S
        )

    async def leave(
        self, sequence: int, report: DataReport, *, signal_name: str = ""
    ) -> None:
        """Ends the membership.

        Does not wait for a coordinator that was silent for more than a few seconds.

        Args:
            sequence: Last push that every shard has acknowledged.
            report: Data that no report has carried.
            signal_name: That of the signal which ends this process, empty for none.

        Raises:
            PsError: The coordinator did not take it.
        """
        self._is_leaving = True
        if not signal_name and self._silent_since is None:
            # With what it has logged last; a process that ends begins no thread.
            await self._send_work(self.work.read())
        deadline = now() + LEAVE_TIMEOUT_S
        attempt = 0
        while True:
            try:
                await self.control.leave(
                    self.worker,
                    sequence,
                    report,
                    signal_name=signal_name,
                    timeout_s=left_s(deadline),
                )
                self._has_left = True
                return
            except CallError as error:
                if error.refusal is None and self._silent_since is None:
                    self._silent_since = now()
                since = self._silent_since
                is_gone = since is not None and now() - since > GONE_TIMEOUT_S
                # A process that a signal ends has no time to wait for a coordinator.
                is_pressed = bool(signal_name) and error.refusal is None
                if not error.is_retryable or is_gone or is_pressed or now() >= deadline:
                    raise error.to_ps_error() from None
            await pause(attempt)
            attempt += 1

    async def close(self) -> None:
        """Ends all calls and channels. Without `leave`, the worker is evicted."""
        self._is_leaving = True
        self._reporting.cancel()
        await asyncio.gather(self._reporting, return_exceptions=True)
        await self._end_watch(is_out=self._has_left)
        await self.shards.close()
        self._history.close()
        await self.control.close()

    def note_wait(self, clock: int, wait_s: float) -> None:
        """A local step has waited for the push of a clock."""
        self._history.waited(self.worker, clock, wait_s)

    def note_round(self, step_count: int, clock: int) -> None:
        """Records how long rounds of local steps are from a clock on."""
        self._history.round_chosen(self.worker, step_count, clock)

    async def _report_silence(self, silent_ms: Mapping[int, int]) -> None:
        timeout_s = self.settings.lease_ttl_ms / 2000
        await self.control.report_silence(self.worker, silent_ms, timeout_s=timeout_s)

    async def _report_work(self) -> None:
        """Reports now and then what the script does."""
        while True:
            await asyncio.sleep(WORK_INTERVAL_S)
            # In a thread: it waits for the devices of tensors that were logged.
            await self._send_work(await asyncio.to_thread(self.work.read))

    async def _send_work(self, done: WorkDone) -> None:
        """Reports what the script has done, if it trains; one may be lost."""
        is_known = self.membership.failure is None and self._silent_since is None
        if not (is_known and done.activity and self.membership.member):
            return
        try:
            await self.control.report_work(
                self.worker,
                done,
                self.shards.traffic,
                self._compression,
                self.work.spans,
                timeout_s=WORK_TIMEOUT_S,
            )
        except CallError as error:
            logger.debug("a report of the work was not taken: %s", error)

    def _opened_history(self) -> PushHistory:
        return PushHistory.open(
            self._wanted_history,
            self.settings.job_id,
            self.worker,
            is_shared=bool(self._process_id),
        )

    async def _end_watch(self, *, is_out: bool) -> None:
        """Ends the watch; of a worker that is out of the job the coordinator does.

        What gRPC awaits of a stream when it is cancelled is never freed, on either side
        (grpc/grpc#43360).
        """
        await self._end_state_calls()
        if is_out and self._silent_since is None:
            await asyncio.wait({self._watching}, timeout=WATCH_END_TIMEOUT_S)
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    def _answer(self, wanted: StateWanted) -> None:
        """Sends registered state for a checkpoint, once the script has come so far."""
        if self._answering is not None:
            self._answering.cancel()

        async def answer() -> None:
            state = await self.script_state.wanted(wanted)
            await self.save_state(wanted.snapshot_id, state)

        self._answering = asyncio.ensure_future(answer())

    async def _end_state_calls(self) -> None:
        for task in (self._answering, self._announcing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._answering = self._announcing = None

    @property
    def missing(self) -> str:
        """What this worker waits for to become a member, in words."""
        waiting = self.membership.waiting
        if self.membership.unreached and self._silent_since is None:
            return f"an answer from {self.membership.unreached}"
        if waiting and self._silent_since is None:
            return str(waiting)
        if self._silent_since is not None:
            return f"{self.control.peer}, lost {now() - self._silent_since:.0f} s ago"
        is_started = self.membership.record is not None
        what = "take this worker in" if is_started else "start the job"
        return f"the coordinator to {what}"

    async def _watch(self) -> None:
        """Keeps the watch open: it is the sign of life."""
        attempt = 0
        while not self._is_leaving:
            try:
                is_first = True
                async for event in self.control.watch_worker(self.worker):
                    attempt = 0
                    self._silent_since = None
                    if not self._is_leaving:
                        self.membership.take(event)
                    if is_first and self.script_state.is_sent:
                        # A coordinator that was started again does not know.
                        self._announcing = asyncio.ensure_future(self.announce_state())
                    is_first = False
                    if isinstance(event, StateWanted):
                        self._answer(event)
            except CallError as error:
                if error.is_decided and not error.is_retryable:
                    self.membership.fail(error.to_ps_error())
                    return
                if self._silent_since is None:
                    self._silent_since = now()
                    logger.warning(
                        "no connection to the coordinator, connecting again: %s", error
                    )
            if self._is_leaving or self.membership.failure is not None:
                return
            await pause(attempt)
            attempt += 1
