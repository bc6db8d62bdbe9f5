"""The steps of one process of a host group.

In the user's thread. It writes its gradient where the others can read it, does what the
group's state machine wants done, and copies the new values.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from pswire import failpoints
from pswire.activity import Activity
from pswire.reasons import ErrorReason
from pswire.schema import OptimizerSpec
from psworker.backends.host.effects import Arrive, Push, Task
from psworker.backends.host.group_entry import GroupEntry
from psworker.backends.host.messages import (
    Done,
    Excluded,
    Failed,
    GroupStatus,
    OptimizerStateOf,
    Reduce,
    RejoinJob,
    SettingsOf,
    StepPart,
)
from psworker.config import WorkerConfig
from psworker.data.batch_tensors import watch_calls
from psworker.errors import (
    EvictedError,
    StepTimeoutError,
    UnsupportedError,
    refuse_closed,
)
from psworker.event_loop import EventLoop
from psworker.launch.launched import HostPlace
from psworker.optim import gradients
from psworker.optim.gradients import SpentGradients
from psworker.optim.optimizer_state import States
from psworker.optim.prepare import Prepared
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import OptimizerStep, StateLoad
from psworker.steps.notices import Notices
from psworker.transport.values import OptimizerSettings
from psworker.transport.waiting_log import WaitingLog
from psworker.work_log import WorkLog

logger: Final = logging.getLogger("psworker")

LOADED_TEXT: Final = (
    "a model and an optimizer were loaded after prepare(), and a group of processes "
    "that push as one can't write the model's values to the job: load both before "
    "prepare()"
)

_MARGIN_S: Final = 5.0
"""Beyond its own limit, the time that a leader may take to report an error."""

_LINGER_S: Final = 5.0
"""How long a leader that is done waits for the others to be done too. After that
another one leads, which costs the group a moment."""

_SPARSE_TEXT: Final = (
    "a sparse gradient is not possible with one push per host: build the embedding "
    "with sparse=False, or start the processes without --one-push-per-host"
)
_FLOAT16_TEXT: Final = (
    "a float16 gradient that carries a loss scale is not possible with one push per "
    "host: train in bfloat16 or float32, or start the processes without "
    "--one-push-per-host"
)


class HostSteps(GroupEntry):
    """Takes the steps of the optimizer of one process.

    Attributes:
        pending: Data that was drawn and not yet pushed.
        status: Where the group stands in the job.
        last_push: What became of the newest push, `None` before the first.
        first_epochs: By loader, the first epoch that was not over when the group
            rejoined the job last; empty if it has not since this process entered.
    """

    # Whether this process can ask shards for optimizer state: by its leader.
    reads_state = True

    def __init__(
        self,
        loop: EventLoop,
        config: WorkerConfig,
        place_on_host: HostPlace,
        given: Prepared,
        *,
        digest: str,
        work: WorkLog,
    ) -> None:
        super().__init__(loop, config, place_on_host, given, digest=digest, work=work)
        self._notices = Notices()
        self._spent = SpentGradients(len(self._tensors))
        self._sample_count = 1
        self._looked = SpentGradients(len(self._tensors))
        self.pending.watch(
            lambda: self._looked.differ_from(self._tensors),
            parameters=self._tensors,
            optimizer_count=len(given.optimizers),
        )
        watch_calls(given.models.values(), self.pending)
        self.first_epochs: Mapping[str, int] = {}
        self._is_stale = False
        self._is_closed = False
        self.last_push: PushResult | None = None

    @property
    def worker_count(self) -> int:
        """Processes of the group, whose samplers split its data."""
        return self.member_count

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient was begun that no step has taken yet."""
        return self._spent.has_others(self._tensors)

    def step(self, wanted: OptimizerStep) -> PushResult:
        """Adds a gradient to the group's next push, and leaves the newest values.

        Raises:
            StepTimeoutError: Some process, worker or shard was late.
            UnsupportedError: The gradient is sparse.
        """
        if failpoints.armed:
            failpoints.hit("worker.step")
        if (earlier := self._settle_earlier()) is not None:
            return earlier
        if wanted.load is not None and self._guard.has_writes:
            raise UnsupportedError(LOADED_TEXT)
        self._look()
        self._guard.check(self.status.clock + 1)
        held = gradients.gradients_of(wanted.spec, wanted.groups, self._tensors)
        if any(each is not None and each.is_sparse for each in held):
            raise UnsupportedError(_SPARSE_TEXT)
        scale = wanted.scale
        if scale is not None and gradients.unscale(held, scale) != 1.0:
            raise UnsupportedError(_FLOAT16_TEXT)
        self._spent.note(held)
        drawn = self.pending.take(wanted.spec.name)
        if drawn.sample_count is not None:
            self._sample_count = drawn.sample_count
        is_stale, self._is_stale = self._is_stale or drawn.is_of_lost, False
        weight = wanted.weight
        if weight is None:
            weight = float(self._sample_count)
        if is_stale:
            weight = 0.0
        if weight and wanted.is_finite:
            for index, value in self._buffers.changed(
                self._store, is_leader=True
            ).items():
                held[index] = value
        else:
            held = [None] * len(held)
        part = replace(
            self._part_of(wanted, held),
            weight=weight,
            is_finite=wanted.is_finite,
            ranges=() if is_stale else drawn.ranges,
            continues_batch=drawn.continues_batch,
        )
        return self._take_part(part, wanted.load, is_discarded=is_stale)

    def push_nothing(self, wanted: OptimizerStep) -> PushResult:
        """Takes part in the group's next push with weight 0."""
        if (earlier := self._settle_earlier()) is not None:
            return earlier
        self._look()
        part = self._part_of(wanted, [None] * len(self._tensors))
        return self._take_part(part, wanted.load)

    def _part_of(
        self, wanted: OptimizerStep, held: Sequence[torch.Tensor | None]
    ) -> StepPart:
        """A part of weight 0, with these gradients, if they are finite, behind it."""
        return StepPart(
            weight=0.0,
            presence=self._life.memory.offer(held),
            groups=wanted.groups,
            spec_digest=wanted.spec_digest,
            scheduler_steps=wanted.scheduler_steps,
            loads_state=wanted.load is not None,
            optimizer=wanted.spec.name,
        )

    def note_zeroed(self) -> None:
        """Data behind gradients that were zeroed has no weight."""
        if self.pending.has_trained and not self.has_gradient:
            self.pending.throw_away()

    def declare(self, spec: OptimizerSpec) -> None:
        """Refused: processes that lead later would not know of it.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "an optimizer keeps its groups with one push per host, and takes no "
            "add_param_group(): give it all its groups before prepare(), freeze "
            "parameters by requires_grad_(False), or start the processes without "
            "--one-push-per-host"
        )

    def optimizer_state(self, optimizer: str, spec_digest: str) -> States:
        """The state of an optimizer after the group's last push, by its leader.

        Raises:
            WaitTimeoutError: It took too long.
        """
        refuse_closed(is_closed=self._is_closed)
        question = OptimizerStateOf(optimizer, spec_digest)
        states: States = self.driver.ask(question).result()
        return states

    def settings_used(self, optimizer: str) -> OptimizerSettings:
        """What the newest update was made with, by the group's leader."""
        refuse_closed(is_closed=self._is_closed)
        settings: OptimizerSettings = self.driver.ask(SettingsOf(optimizer)).result()
        return settings

    def refuse_out(self) -> None:
        """Checks that the group has not gone on without this process.

        Raises:
            EvictedError: It has.
            ClosedError: The connection is closed.
        """
        refuse_closed(is_closed=self._is_closed)
        if self._life.core.is_out:
            raise EvictedError(
                "the host's group went on without this process, which has not entered "
                "again yet"
            )

    def rejoin(self) -> None:
        """Between two steps: enters again, or has the group rejoin the job.

        A gradient that was begun with earlier data is thrown away by the next step.
        """
        refuse_closed(is_closed=self._is_closed)
        is_begun = self.pending.has_drawn and self.has_gradient
        if not self._life.core.is_out:
            try:
                asked = RejoinJob(self._rejoin_count)
                status: GroupStatus = self.driver.ask(asked).result()
            except EvictedError:
                pass  # excluded meanwhile
            else:
                self._note_rejoined(status)
        if self._life.core.is_out:
            self._enter_again()
        self._is_stale = self._is_stale or is_begun

    def _note_rejoined(self, status: GroupStatus) -> None:
        self._rejoin_count = status.rejoin_count
        self.first_epochs = status.first_epochs
        self.pending.start_over()
        self.status = status

    def close(self, *, leaves: bool) -> None:
        """Leaves the group; the last process of it leaves the job.

        Args:
            leaves: Whether the script is done. If not, this process counts as lost.
        """
        if self._is_closed:
            return
        self._is_closed = True
        life = self._life
        deadline = time.monotonic() + _LINGER_S
        while leaves and life.core.is_leader and life.core.others:
            if life.core.is_awaited or time.monotonic() >= deadline:
                break  # others go on: one of them leads
            life.driver.settle()
            time.sleep(0.01)
        is_last = life.core.is_leader and not life.core.others
        life.driver.close()
        if life.leader is not None:
            life.leader.close(leaves=leaves and is_last)
        life.memory.close()

    # A step

    def _settle_earlier(self) -> PushResult | None:
        """Ends a step whose call has failed, if the group has ended it meanwhile."""
        refuse_closed(is_closed=self._is_closed)
        result: PushResult | None = None
        while (task := self._life.driver.pending_task()) is not None:
            found = self._carry_out(task, None)
            result = found or result
        if result is None and self._life.core.is_settling:
            return self._take_part(None, None)
        if result is not None:
            self.last_push = result
        return result

    def _take_part(
        self,
        part: StepPart | None,
        load: StateLoad | None,
        *,
        is_discarded: bool = False,
    ) -> PushResult:
        """Offers a part and does what the group needs until the step is over."""
        driver = self._life.driver
        offered = part or StepPart(weight=0.0, presence=())
        driver.post(lambda core: core.offer(offered))
        before = self._work.begin_step()
        try:
            return self._go_through(part, load, is_discarded=is_discarded)
        finally:
            self._work.enter(before)

    def _go_through(
        self, part: StepPart | None, load: StateLoad | None, *, is_discarded: bool
    ) -> PushResult:
        """Does what the group needs until the step of the offered part is over."""
        limit_s = self._config.step_timeout_s + _MARGIN_S
        deadline, log = time.monotonic() + limit_s, WaitingLog()
        while True:
            before = self._work.enter(Activity.IDLE)  # others have to offer theirs
            try:
                task = self._life.driver.next_task(deadline, log)
            finally:
                self._work.go_back(before)
            if task is None:
                raise StepTimeoutError(
                    f"the step was not complete within {limit_s:g} s: waiting for "
                    f"{self._life.driver.waited_for()}; step() again goes on with it",
                    reason=ErrorReason.WAIT_TIMEOUT,
                )
            result = self._carry_out(task, load)
            if result is not None:
                self.last_push = result
                ranges = part.ranges if part is not None else ()
                done = self._life.core.done
                is_told = is_discarded or bool(done and done.is_discarded)
                if not result.rejoined:
                    self.pending.unreported.note(ranges, is_dropped=result.dropped)
                    self._notices.note_result(result, is_discarded=is_told)
                return result

    def _carry_out(self, task: Task, load: StateLoad | None) -> PushResult | None:
        """Does a task; returns the result of the step once that is over."""
        life = self._life
        match task:
            case Arrive(done=done):
                self._arrive(done)
            case Reduce(attempt=attempt, parts=parts):
                square_sum = life.memory.reduce(parts)
                life.driver.post(lambda core: core.reduced(attempt, square_sum))
            case Push():
                self._push(task, load)
            case Done():
                return self._conclude(task, load)
            case Failed():
                raise task.to_error()
            case Excluded():
                return self._enter_again()
        return None

    def _arrive(self, done: Done) -> None:
        life = self._life
        assert life.leader is not None, "only leaders arrive"
        if done.source != life.core.process:
            life.memory.fill(self._tensors)
        with self._failures_sent():
            found, status = life.leader.arrive(done.status)
        life.driver.post(lambda core: core.arrived(found, status))

    def _push(self, task: Push, load: StateLoad | None) -> None:
        life = self._life
        assert life.leader is not None, "only leaders push"
        if task.done.source != life.core.process:
            life.memory.fill(self._tensors)
        before = task.done.status
        with self._failures_sent():
            result, status, written = life.leader.push(
                task.seal, before, load, is_repeat=task.is_repeat
            )
        is_whole = result.dropped or status.rejoin_count > before.rejoin_count
        done = Done(
            step=task.seal.step,
            source=life.core.process,
            status=status,
            parts=task.seal.parts,
            is_discarded=task.seal.place.is_stale,
            is_void=task.seal.place.is_void or result.rejoined,
            written=written,
            is_whole=is_whole or task.seal.place.is_stale,
        )
        life.driver.post(lambda core: core.pushed(done))

    def _conclude(self, done: Done, load: StateLoad | None) -> PushResult | None:
        """Copies the values of a step that is over."""
        life = self._life
        self._take_values(done, is_whole=done.is_whole)
        if not life.driver.settle():
            return None  # excluded: the next task says so
        life.memory.forget(
            life.memory.processes
            - {life.core.process, done.source, *life.core.members, *life.core.others}
        )
        if done.status.rejoin_count > self._rejoin_count:
            self._note_rejoined(done.status)
        result = done.status.last_push
        assert result is not None, "a step was pushed"
        if load is not None and life.leader is None and not result.dropped:
            load.on_loaded()
        return result

    def _enter_again(self) -> PushResult:
        """Enters again after the group has gone on without this process."""
        core = self._life.core
        counts = core.done is not None and core.counts(core.done.step + 1)
        logger.warning(
            "process %d of this host's group was stopped for too long, and the group "
            "went on without it: it enters again, and what it has computed %s",
            core.process.number,
            "counts" if counts else "is thrown away",
        )
        self._end_life()
        self._life_count += 1
        self._life = self._begin_life()
        self._enter()
        self.pending.start_over()  # its data is dealt to the others
        self.first_epochs = {}
        self._is_stale = False
        last = self.status.last_push
        return PushResult(
            outcome="applied" if counts else "dropped",
            clock=self.status.clock,
            version=last.version if last else 0,
            frontier=last.frontier if last else 0,
            staleness=0,
            mode=self.status.mode,
            duplicate=False,
            rejoined=True,
        )
