"""Steps that overlap with what the script computes; see `docs/overlap.md`.

A step sends what its gradient is, and leaves the push under way. Chunks have gone ahead
of it while the backward pass went on, and values come while the next forward pass
waits for those that it reads. Everything else that needs the step completes it first.

Tensors are touched by the thread that computes, while it is in here, and by one that
copies for it: gradients out of host memory while the backward pass goes on, values into
it before the script looks them up. Gradients are announced by threads of autograd.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch._C import _len_torch_dispatch_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from pswire.schema import OptimizerSpec
from psworker import fork_guard
from psworker.errors import PsError
from psworker.event_loop import EventLoop
from psworker.launch.cores import usable_core_count
from psworker.member.exchange import PushExchange
from psworker.member.session import Session
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import (
    NO_EXTRAS,
    Groups,
    PushExtras,
    StepContents,
)
from psworker.steps.overlap.arriving_values import ArrivingValues
from psworker.steps.overlap.chunk_copies import ChunkCopies
from psworker.steps.overlap.copier import Copier
from psworker.steps.overlap.expectation import Expectation
from psworker.steps.overlap.hooks import ModelHooks
from psworker.steps.overlap.sent_ahead import SentAhead, Usefulness
from psworker.steps.overlap.value_writer import ValueWriter
from psworker.steps.stepper import Stepper
from psworker.tensors.staging import Staging
from psworker.tensors.tensor_chunks import ChunkSource

logger: Final = logging.getLogger("psworker")


class OverlappedStepper(Stepper):
    """Pushes of a worker that overlap with its computing."""

    def __init__(
        self,
        loop: EventLoop,
        session: Session,
        values: ArrivingValues,
        *,
        specs: Mapping[str, OptimizerSpec],
        **named: Any,  # noqa: ANN401
    ) -> None:
        """As a stepper.

        Args:
            loop: Where calls run.
            session: The worker.
            values: Where values go.
            specs: All optimizers by name.
            named: As those of `Stepper`.
        """
        super().__init__(loop, session, values, **named)
        fork_guard.settle_before_fork(self)
        self._values = values
        self._held = {
            name: frozenset(spec.entry_indexes) for name, spec in specs.items()
        }
        self._expectation = Expectation(values.placement, specs)
        self._usefulness = Usefulness()
        self._ahead: SentAhead | None = None
        self._is_at_once = False
        # Chunks that are final only with the buffers of the step, as the last had them.
        self._with_buffers: set[int] = set()
        self._staging = Staging()
        self._copier = Copier()
        self._copies = ChunkCopies()
        self._writer = ValueWriter(values, self._copier)
        self._turn = values.lock
        if text := crowded_text(values.tensors):
            logger.warning(text)
        self._hooks = ModelHooks(
            self._models,
            values.tensors,
            gradient_is_there=self.gradient_is_there,
            about_to_read=self.about_to_read,
        )

    # From the model

    def gradient_is_there(self, entry_index: int) -> None:
        """A backward pass has added to a gradient: sends what is final by it.

        Raises:
            StepTimeoutError: The step before is not complete in time.
        """
        if not (self._is_closed or self.calls.is_forked):
            self.calls.run("backward()", self._send_final, entry_index)

    def _send_final(self, entry_index: int) -> None:
        with self._turn:
            ready = [
                chunk
                for chunk in self._expectation.note(entry_index)
                if chunk.index not in self._with_buffers
            ]
            optimizer = self._expectation.optimizer
            if self._ahead is not None:
                self._ahead.send_staged()
            if not ready or optimizer is None or self._usefulness.is_over:
                return
            if self._ahead is None:
                self._begin_ahead(optimizer)
            if self._ahead is None:
                return
            held = self._held[optimizer]
            self._ahead.send(ready, _Gradients(self._store.tensors, held))

    def about_to_read(self, entry_indexes: Sequence[int]) -> None:
        """Returns once these tensors hold the values of the last step.

        Raises:
            StepTimeoutError: They did not come in time.
        """
        if self._is_closed or self.is_settled:
            return
        self._refuse_forked()
        if not (
            _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()
        ):
            self.calls.run("reading the model", self._wait_for, entry_indexes)
            return
        # Who traces the model, as `torch.export` does, is not to trace the wait.
        with _disable_current_modes():
            self.calls.run("reading the model", self._wait_for, entry_indexes)

    def _wait_for(self, entry_indexes: Sequence[int]) -> None:
        if not self._values.is_open:
            self._settle()
            return
        with self._turn:
            while not self._values.are_there(entry_indexes):
                if not self._writer.wait_next():
                    self._settle()
                    break
            self._values.flush()
            if self._values.written:
                # Before a forward pass changes them.
                self._buffers.note_written(self._values)
            self._values.note_read(entry_indexes)

    # Steps

    @property
    @override
    def is_settled(self) -> bool:
        return not self._values.is_open and super().is_settled

    @override
    def _settle(self) -> None:
        if self._is_closed:
            return
        if not self._values.is_open:
            super()._settle()
            return
        with self._turn:
            self._writer.end()
            exchange = self._unfinished
            is_left = exchange is not None and exchange.is_left
            had_data = self.pending.has_drawn
            try:
                if self._lost is not None:
                    result = self._lose(exchange)
                elif exchange is not None:
                    result = self._finish(exchange, self._values)
                else:
                    self._values.close()
                    return
            finally:
                if self._unfinished is None:
                    self._values.close()
            if self._values.is_mixed or (
                result.rejoined and (had_data or self._values.was_read)
            ):
                self._has_stale_gradient = True
            if not is_left:
                self._settled = result

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

    @override
    def _step(
        self,
        spec: OptimizerSpec,
        groups: Groups,
        *,
        extras: PushExtras,
        **named: Any,
    ) -> PushResult | None:
        # Whoever loads state keeps it until it knows that it has counted.
        is_awaited = extras.is_awaited or extras.loads is not None
        self._is_at_once = not self._hooks.sees_reads or is_awaited
        result = super()._step(spec, groups, extras=extras, **named)
        with self._turn:
            self._expectation.stepped(spec.name)
            self._hooks.watch_gradients()
        return result

    @override
    def declare(self, spec: OptimizerSpec) -> None:
        with self._turn:
            self._drop_ahead()
            super().declare(spec)
            self._held[spec.name] = frozenset(spec.entry_indexes)
            self._expectation.declare(spec)
            self._values.expect(spec.entry_indexes)

    @override
    def push_nothing(
        self, spec: OptimizerSpec, groups: Groups, extras: PushExtras = NO_EXTRAS
    ) -> PushResult:
        self._drop_ahead()
        return super().push_nothing(spec, groups, extras)

    @override
    def _rejoin(self) -> None:
        self._drop_ahead()
        was_open = self._values.is_open
        super()._rejoin()
        self._values.close()
        if was_open and self._settled is not None:
            # Its step has returned: the next one pushes its own gradient.
            self.last_push, self._settled = self._settled, None

    @override
    def close(self) -> None:
        self._hooks.remove()
        self._drop_ahead()
        super().close()
        if self._values.is_open and self._unfinished is not None:
            self._unfinished.cancel()
        self._values.close()
        self._copier.close()

    # Inside

    @override
    def _published(self, *named: Any) -> PushResult:
        self._drop_ahead()
        return super()._published(*named)

    @override
    def _lose(self, exchange: PushExchange | None) -> PushResult:
        self._drop_ahead()
        if exchange is not None:
            exchange.cancel()
        with self._turn:
            self._writer.end()
        return super()._lose(exchange)

    @override
    def _begin(self, contents: StepContents) -> PushExchange:
        with self._turn:
            header = self._next_header(contents.optimizer, contents.value_entries)
            incarnations = self._incarnations()
            ahead, self._ahead = self._ahead, None
            self._with_buffers = {
                chunk.index
                for entry in self._buffers.policies
                if contents.tensors[entry] is not None
                for chunk in self._store.placement.chunks_by_entry.get(entry, ())
            }
            is_empty = all(tensor is None for tensor in contents.tensors)
            loss_scale = contents.trailer.loss_scale
            is_other = ahead is not None and (
                ahead.header != header
                or ahead.incarnations != incarnations
                or (ahead.encoder and ahead.encoder.loss_scale != loss_scale)
            )
            if ahead is not None and (is_empty or is_other):
                self._note_use(is_wasted=bool(is_other))
                ahead.drop()
                ahead = None
            if ahead is None:
                return PushExchange.begin(
                    header,
                    contents,
                    placement=self._store.placement,
                    incarnations=incarnations,
                    loop=self._loop,
                    segments=self._session.shards.segments,
                    encoder=self._encoder_of(header, contents),
                    is_forward_order=True,
                )
            source = ChunkSource(contents.tensors)
            source.encoder = ahead.encoder
            completed = ahead.complete(contents.trailer, source)
            self._note_use(is_wasted=completed.is_wasted)
            return PushExchange(
                completed.pushes,
                source,
                (),
                contents,
                contents.ranges,
                ahead=ahead.calls,
                encoder=ahead.encoder,
            )

    @override
    def _conclude(self, exchange: PushExchange) -> PushResult | None:
        self._taken_back()
        if self._is_at_once:
            return self._finish(exchange, self._values)
        self._values.open()
        self._values.narrow(self._scope_of(exchange))
        exchange.start(self._loop, self._delivery_of(exchange))
        self._writer.begin(exchange)
        exchange.is_left = True
        return None

    @override
    def _watch_reads(self) -> None:
        """All reading is watched already."""

    def _begin_ahead(self, optimizer: str) -> None:
        """Opens the next push, once the one before is complete."""
        self._settle()
        record = self._session.membership.record
        is_here = record is not None and record.member_of(self._session.worker)
        if (
            not is_here
            or self._has_stale_gradient
            or self._unfinished is not None
            or self._ahead is not None
            or not self._arrival.is_over
        ):
            return  # the step finds out what there is to do
        header = self._next_header(optimizer, self._buffers.value_entries)
        self._ahead = SentAhead(
            header,
            self._incarnations(),
            self._store.placement,
            self._loop,
            self._staging,
            self._copier,
            self._copies,
            self.compression.encoder(optimizer, header.seed_text, loss_scale=1.0),
            self._session.shards.segments,
        )
        self._session.shards.begin_ahead(self._ahead.calls)

    def _drop_ahead(self) -> None:
        with self._turn:
            if self._ahead is not None:
                self._ahead.drop()
                self._ahead = None

    def _note_use(self, *, is_wasted: bool) -> None:
        if self._usefulness.note(is_wasted=is_wasted):
            logger.warning(
                "prepare(overlap=True): most of what was sent during the backward pass "
                "was changed before step() in ten steps running, as by clipping or "
                "unscaling; gradients are sent in step() from now on"
            )


def crowded_text(tensors: Sequence[torch.Tensor]) -> str:
    """A warning where torch leaves no core to those who send, empty elsewhere."""
    core_count = usable_core_count()
    is_on_cpu = any(tensor.device.type == "cpu" for tensor in tensors)
    if not is_on_cpu or core_count == 1 or torch.get_num_threads() < core_count:
        return ""
    return (
        f"prepare(overlap=True): torch computes on all {core_count} cores, so that "
        "what is sent meanwhile holds it up; one thread less is faster: "
        f"torch.set_num_threads({core_count - 1}), before prepare()"
    )


class _Gradients(Sequence[torch.Tensor | None]):
    """The gradient of each entry that an optimizer holds, as it is when it's read."""

    def __init__(self, tensors: Sequence[torch.Tensor], held: frozenset[int]) -> None:
        self._tensors = tensors
        self._held = held

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> torch.Tensor | None:  # type: ignore[override]
        return self._tensors[index].grad if index in self._held else None
