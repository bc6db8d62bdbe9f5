"""Pushes that overlap with what the script computes; see `docs/overlap.md`.

A step sends what its gradient is, and leaves the push under way. Chunks have gone ahead
of it while the backward pass went on, and values come while the next forward pass
waits for those that it reads. Everything else that needs the step completes it first.

Tensors are touched by the thread that computes, while it is in here, and by one that
copies for it: gradients out of host memory while the backward pass goes on, values into
it before the script looks them up. Gradients are announced by threads of autograd.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from typing_extensions import override

from pswire.schema import OptimizerSpec
from psworker.event_loop import EventLoop
from psworker.launch.cores import usable_core_count
from psworker.member.exchange import Delivery, PushExchange
from psworker.member.session import Session
from psworker.optim.step_contents import StepContents
from psworker.steps.job_tensors import JobTensors
from psworker.steps.overlap.arriving_values import ArrivingValues, ValueWriter
from psworker.steps.overlap.copier import Copier
from psworker.steps.overlap.expectation import Expectation
from psworker.steps.overlap.sent_ahead import SentAhead, Usefulness
from psworker.steps.sending import Sending
from psworker.tensors.tensor_chunks import ChunkSource
from psworker.tensors.value_store import Scope
from psworker.transport.values import PushHeader

if TYPE_CHECKING:
    from pswire.placement import Chunk

logger: Final = logging.getLogger("psworker")


class DuringBackward(Sending):
    """Sends gradients while a backward pass goes on, and leaves pushes under way."""

    overlaps = True

    def __init__(
        self,
        loop: EventLoop,
        session: Session,
        tensors: JobTensors,
        values: ArrivingValues,
    ) -> None:
        """Sends nothing yet.

        Args:
            loop: Where calls run.
            session: The worker.
            tensors: What it trains.
            values: Where values go: the store of these tensors.
        """
        super().__init__(loop, session, tensors)
        specs = tensors.given.specs
        self._buffers = tensors.buffers
        self._values = values
        self._held = {
            name: frozenset(spec.entry_indexes) for name, spec in specs.items()
        }
        self._expectation = Expectation(values.placement, specs)
        self._usefulness = Usefulness()
        self._ahead: SentAhead | None = None
        self._ready: list[Chunk] = []
        # Chunks that are final only with the buffers of the step, as the last had them.
        self._with_buffers: set[int] = set()
        self._copier = Copier()
        self._writer = ValueWriter(values, self._copier)
        if text := crowded_text(values.tensors):
            logger.warning(text)

    # Gradients

    @override
    def gradient_is_there(self, entry_index: int) -> str | None:
        self._ready = [
            chunk
            for chunk in self._expectation.note(entry_index)
            if chunk.index not in self._with_buffers
        ]
        if self._ahead is not None:
            self._ahead.send_staged()
        if not self._ready or self._usefulness.is_over:
            return None
        if self._ahead is None:
            return self._expectation.optimizer
        self._send_ready(self._ahead)
        return None

    @override
    def begin_ahead(self, header: PushHeader) -> None:
        self._ahead = ahead = SentAhead(
            header,
            self.session.shards.incarnations,
            self._placement,
            self.loop,
            self._copier,
            self._compression.encoder(
                header.optimizer, header.seed_text, loss_scale=1.0
            ),
            self.session.shards.segments,
        )
        self.session.shards.begin_ahead(ahead.calls)
        self._send_ready(ahead)

    def _send_ready(self, ahead: SentAhead) -> None:
        held = self._held[ahead.header.optimizer]
        ahead.send(self._ready, _Gradients(self._values.tensors, held))

    @override
    def drop(self) -> None:
        if self._ahead is not None:
            self._ahead.drop()
            self._ahead = None

    @override
    def begin(self, header: PushHeader, contents: StepContents) -> PushExchange:
        ahead, self._ahead = self._ahead, None
        self._with_buffers = {
            chunk.index
            for entry in self._buffers.policies
            if contents.tensors[entry] is not None
            for chunk in self._placement.chunks_by_entry.get(entry, ())
        }
        if ahead is not None and not self._goes_on(ahead, header, contents):
            ahead.drop()
            ahead = None
        if ahead is None:
            return super().begin(header, contents)
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

    def _goes_on(
        self, ahead: SentAhead, header: PushHeader, contents: StepContents
    ) -> bool:
        """Whether what went ahead is of this push."""
        loss_scale = contents.trailer.loss_scale
        is_other = bool(
            ahead.header != header
            or ahead.incarnations != self.session.shards.incarnations
            or (ahead.encoder and ahead.encoder.loss_scale != loss_scale)
        )
        is_empty = all(tensor is None for tensor in contents.tensors)
        if is_empty or is_other:
            self._note_use(is_wasted=is_other)
            return False
        return True

    def _note_use(self, *, is_wasted: bool) -> None:
        if self._usefulness.note(is_wasted=is_wasted):
            logger.warning(
                "prepare(overlap=True): most of what was sent during the backward pass "
                "was changed before step() in ten steps running, as by clipping or "
                "unscaling; gradients are sent in step() from now on"
            )

    @override
    def declare(self, spec: OptimizerSpec) -> None:
        self.drop()
        self._held[spec.name] = frozenset(spec.entry_indexes)
        self._expectation.declare(spec)
        self._values.expect(spec.entry_indexes)

    @override
    def stepped(self, optimizer: str) -> None:
        self._expectation.stepped(optimizer)

    # Values

    @property
    @override
    def is_open(self) -> bool:
        return self._values.is_open

    @override
    def leave(
        self, exchange: PushExchange, delivery: Delivery, scope: Scope | None
    ) -> bool:
        self._values.open()
        self._values.narrow(scope)
        exchange.start(self.loop, delivery)
        self._writer.begin(exchange)
        return True

    @override
    def wait_for(self, entry_indexes: Sequence[int]) -> bool:
        if not self._values.is_open:
            return False
        with self._values.lock:
            while not self._values.are_there(entry_indexes):
                if not self._writer.wait_next():
                    return False
            self._values.flush()
            if self._values.written:
                # Before a forward pass changes them.
                self._buffers.note_written(self._values)
            self._values.note_read(entry_indexes)
        return True

    @override
    def end_writing(self) -> None:
        with self._values.lock:
            self._writer.end()

    @override
    def complete(self) -> None:
        self._values.close()

    @override
    def was_mixed(self, *, rejoined: bool) -> bool:
        return self._values.is_mixed or (rejoined and self._values.was_read)

    @override
    def close(self) -> None:
        self._values.close()
        self._copier.close()


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
