"""The steps of a worker: gradients that are pushed, and values that are waited for."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torch._C import _len_torch_dispatch_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from pswire import failpoints
from pswire.activity import Activity
from psworker import fork_guard
from psworker.data.pending import PendingData
from psworker.errors import (
    ConfigurationError,
    EvictedError,
    PsError,
    UnsupportedError,
)
from psworker.member.exchange import PushExchange
from psworker.member.joining import Joined
from psworker.optim import gradients
from psworker.optim.buffers import leads
from psworker.optim.private_gradients import PrivateGradients
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import OptimizerStep, StepContents
from psworker.optim.user_calls import UserCalls
from psworker.steps.model_hooks import ModelHooks
from psworker.steps.publishing import Publisher
from psworker.steps.pushes import READING
from psworker.steps.sending import Sending
from psworker.transport.values import DrawnData

logger: Final = logging.getLogger("psworker")


class Stepper(Publisher):
    """Steps of a worker's optimizers."""

    # Whether this process can ask shards for optimizer state.
    reads_state = True
    # Puts private gradients in the place of the script's, None without.
    private: PrivateGradients | None = None

    def __init__(
        self,
        sending: Sending,
        *,
        pending: PendingData,
        joined: Joined,
        timeout_s: float,
        calls: UserCalls,
    ) -> None:
        super().__init__(
            sending, pending=pending, joined=joined, timeout_s=timeout_s, calls=calls
        )
        # A second step on the same batch, as a GAN takes it, has as many samples.
        self._sample_count = 1
        self._new_sample_count = 0.0  # behind the newest step and none before
        self._models = tuple(sending.tensors.given.models.values())
        self._hooks: ModelHooks | None = None
        if self.overlaps:
            fork_guard.settle_before_fork(self)
            self._hooks = ModelHooks(
                self._models,
                self._store.tensors,
                gradient_is_there=self._gradient_is_there,
                about_to_read=self._about_to_read,
            )

    def step(self, wanted: OptimizerStep) -> PushResult | None:
        """Pushes the gradient of one optimizer and leaves the newest values.

        Returns:
            What became of it, `None` while that is left under way.

        Raises:
            StepTimeoutError: Some worker or shard did not come in time.
            UnsupportedError: The optimizer can't take a gradient, sparse or dense.
        """
        if failpoints.armed:
            failpoints.hit("worker.step")
        if self.private is not None:
            _refuse_unprotected(wanted)
        if wanted.load is not None:
            wanted = self._with_loaded_values(wanted, wanted.load)
        before = self.sequence_acknowledged
        work = self._session.work
        is_beside = wanted.of_round is not None and wanted.of_round.is_beside
        did_before = work.activity if is_beside else work.begin_step()
        try:
            try:
                return self._step(wanted)
            finally:
                work.enter(did_before)
        except PsError:
            raise
        except BaseException:  # also of Ctrl-C once the step has counted
            self._note_interrupted(before)
            raise

    def _step(self, wanted: OptimizerStep) -> PushResult | None:
        """As `step`, which sees to errors that are none of psworker's."""
        of_round = wanted.of_round
        if wanted.load is None and of_round is None and self.is_void(wanted.spec.name):
            return self.last_push
        if (result := self._open(wanted, takes_data=True)) is not None:
            return result
        if of_round is None or not of_round.is_beside:
            self.keep_script_state()
        # Whoever loads state keeps it until it knows that it has counted.
        is_awaited = wanted.is_awaited or wanted.load is not None
        contents = self._with_gradient(wanted)
        try:
            place = self._session.core.next_push()
            if of_round is not None and (
                of_round.clock != place.clock
                or of_round.rejoin_count != self.rejoin_count
            ):
                return None
            exchange = self._begin(contents, place)
        except EvictedError:
            return self._lose(None)
        self._has_stale_gradient = False
        # Beside the script it is under way on purpose, and not left by an error.
        exchange.is_left = of_round is not None and of_round.is_beside
        self._unfinished = exchange
        result = self._conclude(exchange, is_awaited=is_awaited)
        self._sending.stepped(wanted.spec.name)
        self._session.work.note_step(self._new_sample_count)
        if self._hooks is not None:
            self._hooks.watch_gradients()
        return result

    def keep_script_state(self) -> None:
        """Has checkpoints take what the script has registered as of the next push."""
        self._session.script_state.step(self.sequence_acknowledged + 1)

    def is_void(self, optimizer: str) -> bool:
        """Whether a step goes on with a batch from which the job has returned.

        It pushes nothing: no checkpoint is within a batch, and the others begin one.
        """
        return self._session.rewinds.is_begun and self.pending.goes_on(optimizer)

    def _with_gradient(self, wanted: OptimizerStep) -> StepContents:
        """The gradient that is there, with its data, weight, norm and verdict."""
        if self.private is not None:
            self._make_private(self.private, wanted)
        held = gradients.gradients_of(wanted.spec, wanted.groups, self._store.tensors)
        scale = wanted.scale
        loss_scale = 1.0 if scale is None else gradients.unscale(held, scale)
        loss_scale /= wanted.averaged_over
        self._spent.note(held)
        of_round = wanted.of_round
        drawn = of_round.drawn if of_round else self.pending.take(wanted.spec.name)
        if drawn.sample_count is not None:
            self._sample_count = drawn.sample_count
        self._new_sample_count = _new_samples(drawn, wanted.weight)
        weight = wanted.weight
        if is_discarded := self._has_stale_gradient or drawn.is_of_lost:
            weight = 0.0
        elif weight is None:
            weight = float(self._sample_count)
        is_counted = wanted.is_finite and weight > 0
        norm = gradients.norm_of(held) / loss_scale if is_counted else 0.0
        is_finite = is_discarded or (wanted.is_finite and gradients.is_finite(norm))
        # Neither a skipped clock nor a weight of 0 needs any bytes.
        averaged_buffers = b""
        if not is_finite or weight == 0:
            held = [None] * len(held)
        elif self._buffers.are_sent:
            place = self._session.membership.record, self._session.worker
            averaged_buffers = self._buffers.add_to(
                held,
                self._store,
                is_leader=leads(*place, self.sequence_acknowledged + 1),
            )
        nothing = self._without_gradient(wanted)
        return replace(
            nothing,
            tensors=held,
            trailer=replace(
                nothing.trailer,
                weight=weight,
                is_finite=is_finite,
                ranges=() if is_discarded else drawn.ranges,
                loss_scale=loss_scale,
                gradient_norm=norm if is_finite else 0.0,
                averaged_buffers=averaged_buffers,
                continues_batch=drawn.continues_batch,
            ),
            ranges=drawn.ranges,
            is_discarded=is_discarded,
        )

    def _make_private(self, private: PrivateGradients, wanted: OptimizerStep) -> None:
        """Replaces the gradients of a step by private ones.

        Raises:
            ConfigurationError: A sample might count twice in this step.
            UnsupportedError: No gradient of single samples can be computed.
        """
        tensors = self._store.tensors
        own = [tensors[index] for index in wanted.spec.entry_indexes]
        if self._has_stale_gradient or wanted.weight == 0:
            private.discard(own)  # nor may a further step send them
            return
        trained = self.pending.trained
        ranges = [each.data_range for each in trained if each.data_range is not None]
        epochs = {each.epoch for each in ranges}
        if len(epochs) > 1 or len(set(ranges)) < len(ranges):
            raise ConfigurationError(
                "this step is of batches in which a sample may be twice, since they "
                f"are of epochs {', '.join(map(str, sorted(epochs)))}: step, or zero "
                "the gradients, at the end of each epoch"
            )
        private.replace(
            own,
            [each.sample_count for each in trained],
            is_new=self._spent.has_new(tensors),
        )

    def _conclude(
        self, exchange: PushExchange, *, is_awaited: bool
    ) -> PushResult | None:
        """Does what is left of a step whose push has begun."""
        store = self._taken_back()
        is_seen = self._hooks is not None and self._hooks.sees_reads
        if is_awaited or not is_seen:
            return self._finish(exchange, store)
        delivery, scope = self._delivery_of(exchange), self._scope_of(exchange)
        if not self._sending.leave(exchange, delivery, scope):
            return self._finish(exchange, store)
        exchange.is_left = True
        return None

    def push_nothing(self, wanted: OptimizerStep) -> PushResult:
        """Pushes weight 0 for the next clock, for a worker that has no data.

        With a gradient begun the values are kept back until the next step, since it
        was computed from the values that are there. Where no data was drawn since the
        last step none is begun: a GAN leaves some behind that it never steps with.
        """
        if self._loaded is not None:
            wanted = replace(wanted, load=None)  # goes with its values, by a step
        if (result := self._open(wanted, takes_data=False)) is not None:
            return result
        try:
            exchange = self._begin(self._without_gradient(wanted))
        except EvictedError:
            return self._lose(None)
        if not (self.pending.has_drawn and self.has_gradient):
            return self._finish(exchange, self._taken_back())
        if self._shadow is None:
            self._shadow = self._store.copy()
        return self._finish(exchange, self._shadow)

    def note_zeroed(self) -> None:
        """What was behind gradients that were zeroed has no weight."""
        if self.private is not None:
            self.private.forget()
        if self.pending.has_trained and not self.has_gradient:
            self.pending.throw_away()

    def _note_interrupted(self, before: int) -> None:
        """The script has left a step by an error of its own, such as Ctrl-C.

        Its push is settled before the model is read again, or with the next step.

        Args:
            before: Last push that was settled before the step.
        """
        unfinished = self._unfinished
        if unfinished is not None:
            unfinished.is_left = False
            self._watch_reads()
        elif self.sequence_acknowledged > before:
            self._settled = self.last_push  # the same step again pushes nothing

    @override
    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        if self.private is not None:
            self.private.remove()
        super().close()

    # What the hooks of the models call

    def _watch_reads(self) -> None:
        if self._hooks is None and self._models:
            self._hooks = ModelHooks(
                self._models, self._store.tensors, about_to_read=self._about_to_read
            )

    def _gradient_is_there(self, entry_index: int) -> None:
        """A backward pass has added to a gradient: sends what is final by it.

        Raises:
            StepTimeoutError: The step before is not complete in time.
        """
        if not (self._is_closed or self.calls.is_forked):
            self.calls.run("backward()", self._send_final, entry_index)

    def _send_final(self, entry_index: int) -> None:
        optimizer = self._sending.gradient_is_there(entry_index)
        if optimizer is None:
            return
        self._settle()
        record = self._session.membership.record
        is_here = record is not None and record.member_of(self._session.worker)
        if (
            is_here
            and not self._has_stale_gradient
            and self._unfinished is None
            and self._late_joiner is None
            and not self._session.rewinds.is_begun
        ):  # else the step finds out what there is to do
            place = self._session.core.next_push()
            self._sending.begin_ahead(
                self._header_of(place, optimizer, self._buffers.value_entries)
            )

    def _about_to_read(self, entry_indexes: Sequence[int]) -> None:
        """Returns once these tensors hold the values of the last step.

        Raises:
            StepTimeoutError: They did not come in time.
        """
        if not (self._is_closed or self._is_settled):
            self._refuse_forked()
            if _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
                # Who traces the model, as `torch.export` does, must not trace the wait.
                with _disable_current_modes():
                    self.calls.run(READING, self._wait_for, entry_indexes)
            else:
                self.calls.run(READING, self._wait_for, entry_indexes)
        if self._hooks is not None and not self.overlaps:
            self._hooks.remove()  # until a step is left by an error again
            self._hooks = None

    def _wait_for(self, entry_indexes: Sequence[int]) -> None:
        before = self._session.work.enter(Activity.WAITING)
        try:
            if not self._sending.wait_for(entry_indexes):
                self._settle()
        finally:
            self._session.work.enter(before)

    def settle_before_fork(self) -> None:
        """Completes a step that is under way, whose values would not come to a child.

        Where that can't be done the child refuses to read them.
        """
        if self._is_closed or self.calls.is_forked or self.calls.is_within:
            return
        try:
            self.settle()
        except PsError as error:
            logger.warning(
                "this process forks while a step is under way, which could not be "
                "completed before; the child can't read the model: %s",
                error,
            )


def _new_samples(drawn: DrawnData, weight: float | None) -> float:
    """Samples behind a step that none before has had; 0 where none are counted."""
    if drawn.continues_batch:
        return 0
    if drawn.sample_count is not None:
        return drawn.sample_count
    return weight or 0


def _refuse_unprotected(wanted: OptimizerStep) -> None:
    """Refuses what would go with a step without noise.

    Raises:
        UnsupportedError: With the cure. Nothing was sent.
    """
    if wanted.load is not None:
        raise UnsupportedError(
            "loaded or edited optimizer state would be sent as it is, and this job has "
            "differential_privacy: load it before prepare()"
        )
    if wanted.weight:
        raise UnsupportedError(
            "with differential_privacy a push has the weight of the samples that were "
            "drawn for it: leave step(weight=...) out"
        )
    if wanted.scale is not None or not wanted.is_finite:
        raise UnsupportedError(
            "a GradScaler tells all workers where a gradient without noise overflows: "
            "with differential_privacy train in bfloat16, or without autocast"
        )
