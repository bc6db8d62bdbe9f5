"""The steps of a member: sequence numbers, clocks, what was acknowledged.

In the user's thread only. One push is under way at a time.
"""

import logging
from typing import Final

import torch

from pswire.schema import OptimizerSpec
from psworker import gradients
from psworker.errors import ClosedError, CorruptionError, PsError, StepTimeoutError
from psworker.event_loop import EventLoop
from psworker.exchange import PushExchange
from psworker.outgoing_push import OutgoingPush
from psworker.pending import DataRange, PendingData
from psworker.push_result import PushResult, combine
from psworker.session import Session
from psworker.tensor_chunks import ChunkSource, ValueStore
from psworker.transport.values import Member, PushHeader, PushTrailer

logger: Final = logging.getLogger("psworker")

Groups = tuple[tuple[float, ...], ...]


class Stepper:
    """Pushes of one start of a worker.

    Attributes:
        member: This worker's place in the job.
        last_push: What became of the newest push, `None` before the first.
        sequence_acknowledged: Last push that every shard has answered.
    """

    def __init__(
        self,
        loop: EventLoop,
        session: Session,
        store: ValueStore,
        *,
        pending: PendingData,
        member: Member,
        timeout_s: float,
    ) -> None:
        self._loop = loop
        self._session = session
        self._store = store
        self._timeout_s = timeout_s
        self._unfinished: PushExchange | None = None
        self._shadow: ValueStore | None = None
        self._generation = 0
        self._is_closed = False
        # A second step on the same batch, as a GAN takes it, has as many samples.
        self._sample_count = 1
        self.pending = pending
        self.member = member
        self.last_push: PushResult | None = None
        self.sequence_acknowledged = 0

    @property
    def clock(self) -> int:
        """Clocks this worker has completed, from its base."""
        return self.member.base_clock + self.sequence_acknowledged

    @property
    def generation(self) -> int:
        """Newest generation that the coordinator or a shard has told."""
        record = self._session.membership.record
        return max(self._generation, record.generation if record else 0)

    def step(
        self,
        spec: OptimizerSpec,
        groups: Groups,
        *,
        weight: float | None,
        is_finite: bool = True,
        scale: torch.Tensor | None = None,
    ) -> PushResult:
        """Pushes the gradient of one optimizer and leaves the newest values.

        Args:
            spec: The optimizer.
            groups: Its current hyperparameters.
            weight: Samples behind the gradient, `None` for those drawn since.
            is_finite: Whether a loss scaler found the gradient finite.
            scale: Loss scale that the gradient still carries.

        Raises:
            StepTimeoutError: Some worker or shard did not come in time.
        """
        self.refuse_closed()
        if self._unfinished is not None:
            return self._finish(self._unfinished)
        held = self._gradients_of(spec)
        if scale is not None:
            gradients.unscale(held, scale)
        drawn = self.pending.take()
        if drawn.sample_count is not None:
            self._sample_count = drawn.sample_count
        if weight is None:
            weight = float(self._sample_count)
        is_finite = is_finite and (weight == 0 or gradients.is_finite(held))
        # Neither a skipped clock nor a weight of 0 needs any bytes.
        if not is_finite or weight == 0:
            held = [None] * len(held)
        trailer = PushTrailer(
            weight=weight, groups=groups, is_finite=is_finite, ranges=drawn.ranges
        )
        return self._finish(self._begin(spec, trailer, ChunkSource(held)))

    def push_nothing(self, spec: OptimizerSpec, groups: Groups) -> PushResult:
        """Pushes weight 0 for the next clock, for a worker that has no data.

        With gradients pending the values are kept back until the next step, since
        those gradients were computed from the values that are there.
        """
        self.refuse_closed()
        if self._unfinished is not None:
            return self._finish(self._unfinished)
        trailer = PushTrailer(weight=0.0, groups=groups, is_finite=True, ranges=())
        nothing = ChunkSource([None] * len(self._store.tensors))
        exchange = self._begin(spec, trailer, nothing)
        if not gradients.are_pending(self._store.tensors):
            return self._finish(exchange)
        if self._shadow is None:
            self._shadow = self._store.copy()
        return self._finish(exchange, self._shadow)

    def close(self) -> None:
        """Refuses everything from now on."""
        self._is_closed = True

    def refuse_closed(self) -> None:
        """Checks that the connection is open.

        Raises:
            ClosedError: It is not.
        """
        if self._is_closed:
            raise ClosedError("the connection is closed: connect() and prepare() again")

    def _gradients_of(self, spec: OptimizerSpec) -> list[torch.Tensor | None]:
        parameters: list[torch.Tensor | None] = [None] * len(self._store.tensors)
        for group in spec.groups:
            for index in group.entry_indexes:
                parameters[index] = self._store.tensors[index]
        return gradients.collect_gradients(parameters)

    def _begin(
        self, spec: OptimizerSpec, trailer: PushTrailer, source: ChunkSource
    ) -> PushExchange:
        sequence = self.sequence_acknowledged + 1
        header = PushHeader(
            job_id=self._session.settings.job_id,
            optimizer=spec.name,
            worker=self._session.worker,
            generation=self.generation,
            sequence=sequence,
            sequence_unacknowledged_min=sequence,
            clock=self.member.base_clock + sequence,
        )
        pushes = []
        chunks = []
        for shard_index, own in enumerate(self._store.placement.chunks_by_shard):
            bitmap = tuple(any(source.presence(chunk)) for chunk in own)
            sent = [chunk for chunk, bit in zip(own, bitmap, strict=True) if bit]
            chunks += sent
            pushes.append(
                OutgoingPush(
                    header,
                    trailer,
                    shard_incarnation=self._session.shards.incarnation(shard_index),
                    chunk_bitmap=bitmap,
                    chunk_indexes=[chunk.index for chunk in sent],
                    notify=self._loop.notify,
                )
            )
        # As a backward pass makes them: the last layers' first.
        chunks.sort(key=lambda chunk: -chunk.index)
        return PushExchange(spec.name, pushes, source, chunks, trailer.ranges)

    def _finish(
        self, exchange: PushExchange, store: ValueStore | None = None
    ) -> PushResult:
        if store is None and self._shadow is not None:
            self._store.take_from(self._shadow)
            self._shadow = None
        self._unfinished = exchange
        try:
            replies = exchange.run(
                self._loop,
                lambda receiver: self._session.shards.push(
                    exchange.pushes, receiver, timeout_s=self._timeout_s
                ),
                store or self._store,
            )
        except (StepTimeoutError, CorruptionError):
            raise
        except PsError:
            # Decided, or the job is over: nothing to go on with.
            self._unfinished = None
            raise
        self._unfinished = None
        self.sequence_acknowledged = exchange.pushes[0].header.sequence
        self._generation = max(reply.generation for reply in replies)
        self.last_push = combine(replies)
        self._account(exchange.ranges, self.last_push)
        return self.last_push

    def _account(self, ranges: tuple[DataRange, ...], result: PushResult) -> None:
        self.pending.acknowledge(ranges)
        if result.skipped:
            logger.warning(
                "clock %d was skipped: the gradient of %s was not finite",
                result.clock,
                ", ".join(result.nonfinite_worker_ids) or "some worker",
            )
        if result.dropped:
            logger.warning("the gradient for clock %d was dropped", result.clock)
