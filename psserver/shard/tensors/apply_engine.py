"""Everything a shard holds and does with numbers.

Calls may come from different threads at once: a lock for each chunk keeps its readers
and its update apart. Updates of one chunk, and seeding, are serialised by the caller.
Torch releases the GIL during kernels. The daemon calls `torch.set_num_threads(1)` once,
since chunks are the unit of parallelism here: torch's own threads would compete.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from psserver.shard.core.effects import BufferAverage
from psserver.shard.tensors.aggregate import (
    Mean,
    NormLimit,
    finite_mean,
    is_finite,
    mean_of,
    square_sum,
)
from psserver.shard.tensors.buffers import ShardBuffers
from psserver.shard.tensors.chunk_image import (
    ChunkImage,
    HeldState,
    PendingImage,
    copy_of,
)
from psserver.shard.tensors.contribution import (
    ChunkRows,
    Contribution,
    present_count,
    read_rows,
)
from psserver.shard.tensors.delay_rules import DelayRules, compensated, scaled_rates
from psserver.shard.tensors.optimizer_state import check_state
from psserver.shard.tensors.robust_aggregate import (
    coordinatewise,
    products_of,
    spread,
)
from psserver.shard.tensors.sent_values import SentValues
from psserver.shard.tensors.shard_optimizers import (
    DeclaredOptimizers,
    MasterValues,
    ShardOptimizers,
)
from psserver.shard.tensors.shard_vectors import (
    ShardVectors,
    VectorMemory,
    present_runs,
    private_memory,
)
from psserver.shard.tensors.sparse_mean import elements_of
from psserver.shard.tensors.values_encoder import Messages, ValuesEncoder
from pswire.aggregation import MEAN, Aggregation
from pswire.job_terms import JobTerms
from pswire.optimizer_states import ChunkState, StateKey
from pswire.placement import Chunk, Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import OptimizerSpec
from pswire.torch_types import buffer_of


@dataclass(frozen=True, slots=True)
class AppliedChunk:
    """What became of the contributions to a chunk.

    Attributes:
        presence: Slices that were updated; none when nothing was.
        torn_worker_ids: Contributors left out, since their data is not finite.
    """

    presence: tuple[bool, ...]
    torn_worker_ids: tuple[str, ...]


@dataclass(slots=True)
class _Seed:
    """First values of all chunks, and what else there is of some.

    Attributes:
        vectors: The values.
        masters: By chunk.
        states: Of each optimizer, by chunk.
    """

    vectors: ShardVectors
    masters: dict[int, torch.Tensor] = field(default_factory=dict)
    states: dict[str, dict[int, HeldState]] = field(default_factory=dict)


class ApplyEngine:
    """Values and optimizers of one shard.

    Attributes:
        declared: Optimizers of the job.
        vectors: The values.
        sends_changes: Whether messages with values depend on what their receiver was
            sent before.
    """

    def __init__(
        self,
        terms: JobTerms,
        placement: Placement,
        shard_index: int,
        *,
        delay: DelayRules | None = None,
        aggregation: Aggregation = MEAN,
        memory: VectorMemory = private_memory,
    ) -> None:
        """Starts with zeros, to be seeded.

        Args:
            terms: Of the job.
            placement: How its tensors are cut.
            shard_index: Which shard this is.
            delay: What is done about the delay of pushes; None for nothing.
            aggregation: What the gradients of a clock become.
            memory: Makes the memory of the values.

        Raises:
            Refusal: For an optimizer that this shard can't run.
        """
        self._schema = terms.schema
        self._chunks = placement.chunks_by_shard[shard_index]
        self._row_lengths = [entry.row_length for entry in terms.schema.entries]
        self.declared = DeclaredOptimizers(terms.schema, terms.optimizers)
        self._delay = delay or DelayRules()
        self._aggregation = aggregation
        self._locks = {chunk.index: threading.Lock() for chunk in self._chunks}
        self._pending: PendingImage[ChunkImage] | None = None
        self._seed: _Seed | None = None
        vectors = ShardVectors(placement, shard_index, memory)
        self._install(_Seed(vectors), is_seeded=False)
        self._encoder = ValuesEncoder(terms.compression, self.buffer_entries)
        self.sends_changes = self._encoder.sends_changes

    @property
    def state_byte_count(self) -> int:
        """Bytes beside the values: optimizer state and master values."""
        return self._masters.byte_count + self._optimizers.state_byte_count

    def updatable(self, chunk_index: int) -> tuple[bool, ...]:
        """Slices of a chunk that some optimizer has, and buffers that were pushed."""
        return self._buffers.with_changed(
            chunk_index, self._optimizers.updatable(chunk_index)
        )

    @property
    def buffer_entries(self) -> tuple[int, ...]:
        """All buffers of the schema, in its order."""
        return self._buffers.entry_indexes

    def check_chunk(
        self,
        chunk_index: int,
        presence: tuple[bool, ...],
        byte_count: int,
        *,
        optimizer: str,
        row_indices: memoryview | None = None,
        value_entries: frozenset[int] = frozenset(),
    ) -> ChunkRows:
        """Checks a received chunk before it is staged; changes nothing.

        Args:
            chunk_index: Which chunk.
            presence: Which of its slices came.
            byte_count: Bytes of their elements.
            optimizer: Name of the optimizer that shall apply it.
            row_indices: Of a sparse chunk, which rows came.
            value_entries: Tensors of which it has values.

        Returns:
            The rows, for `Contribution`.

        Raises:
            Refusal: `CHUNK_INVALID` or `MALFORMED_MESSAGE`, with what was expected;
                `OPTIMIZER_MISMATCH` for an optimizer that the job does not have.
        """
        chunk = self.vectors.chunk(chunk_index)
        self.declared.spec(optimizer)
        membership = self._optimizers.membership(optimizer, chunk_index)
        if len(presence) != len(membership):
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk_index} has {len(membership)} slices, the presence "
                f"bits are {len(presence)}",
            )
        held = self._optimizers.held(optimizer, chunk_index)
        if presence == held.membership:
            expected = held.element_count
        else:
            allowed = self._buffers.with_all(chunk_index, membership)
            if value_entries:
                allowed = tuple(
                    is_allowed or piece.entry_index in value_entries
                    for is_allowed, piece in zip(allowed, chunk.slices, strict=True)
                )
            expected = present_count(chunk, presence, allowed, optimizer)
        rows = read_rows(
            chunk,
            presence,
            row_indices,
            row_lengths=self._row_lengths,
            membership=membership,
            specs=self.declared.all_of(optimizer),
            aggregation=self._aggregation,
        )
        for piece, each in zip(chunk.slices, rows, strict=False):
            if each is not None:
                if piece.entry_index in value_entries:
                    raise Refusal(
                        ErrorReason.CHUNK_INVALID,
                        f"chunk {chunk_index} has rows of tensor {piece.entry_index}, "
                        "of which the push has values: they come whole",
                    )
                expected += each.element_count - piece.element_count
        expected *= chunk.element_type.byte_count
        if byte_count != expected:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"the present slices of chunk {chunk_index} take {expected} bytes, "
                f"{byte_count} came",
            )
        return rows

    def declare(self, spec: OptimizerSpec) -> None:
        """Takes a later declaration of an optimizer; see `DeclaredOptimizers`.

        Raises:
            Refusal: This shard can't run it.
        """
        self.declared.declare(spec)
        self._optimizers.note_declared()

    def apply(
        self,
        chunk_index: int,
        *,
        optimizer: str,
        contributions: Sequence[Contribution],
        total_weight: float,
        hyperparameters: Sequence[Sequence[float]],
        pulled: SentValues | None = None,
        staleness: int | None = None,
        average: BufferAverage | None = None,
        gradient_scale: float = 1.0,
        spec_digest: str = "",
        limit: NormLimit | None = None,
    ) -> AppliedChunk:
        """Updates a chunk by the aggregate of its contributions, or their sum.

        Args:
            chunk_index: A chunk of this shard.
            optimizer: Name of the optimizer.
            contributions: Checked by `check_chunk`, sorted by worker id.
            total_weight: Weight of all contributors to the clock, those without this
                chunk too. 0 updates nothing.
            hyperparameters: Values of each group, checked.
            pulled: In SSP and ASP, what the pusher was sent, if it is still known.
            staleness: In SSP and ASP, updates since the values it came from; None for
                a clock of BSP.
            average: In SSP and ASP, how its buffers enter those of the shard.
            gradient_scale: What the mean is multiplied by, to clip it.
            spec_digest: Declaration of the optimizer that the hyperparameters are of,
                empty for the first. Slices that only others have are left alone.
            limit: In SSP and ASP, how much of the push may be applied. What is beyond
                is left out as torn.
        """
        spec = self.declared.spec(optimizer, spec_digest)
        chunk = self.vectors.chunk(chunk_index)
        gradients, with_values = self._buffers.part(chunk, contributions)
        divisor = None if spec.loss_is_sum else total_weight
        mean = self._optimizers.within(
            spec, chunk, self._aggregate(chunk, gradients, divisor)
        )
        presence = mean.presence
        if limit is not None and any(presence):
            square = square_sum(mean.gradient) * gradient_scale**2
            if not limit.admits(square):
                liars = contributions if limit.is_exact else ()
                torn = tuple(each.worker_id for each in liars)
                return AppliedChunk((False,) * len(presence), torn)
        if not (any(presence) or with_values):
            return AppliedChunk(presence, mean.torn_worker_ids)
        values = tuple(tuple(group) for group in hyperparameters)
        if self._delay.is_rate_scaled and staleness is not None:
            values = scaled_rates(spec, values, staleness)
        with self._changing(chunk_index), self.vectors.updating(chunk_index):
            self._encoder.note_update(chunk_index)
            if any(mean.presence):
                if gradient_scale != 1.0:
                    mean = replace(mean, gradient=mean.gradient * gradient_scale)
                gradient = mean.gradient
                if self._delay.compensation and pulled is not None:
                    gradient = self._compensated(chunk, mean, pulled)
                held = self._optimizers.under(spec, chunk_index)
                held.apply(gradient, mean.presence, values, mean.positions)
                self._masters.publish(chunk, mean.presence)
            if with_values:
                view = self.vectors.view(chunk_index)
                taken = self._buffers.take(
                    chunk,
                    view,
                    with_values,
                    average,
                    is_robust=self._aggregation.is_robust,
                )
                self._masters.take(chunk, taken)
                presence = _union(presence, taken)
        return AppliedChunk(presence, mean.torn_worker_ids)

    def sum_of_squares(
        self,
        chunk_index: int,
        *,
        optimizer: str,
        contributions: Sequence[Contribution],
        total_weight: float,
        spec_digest: str = "",
    ) -> float:
        """Of the aggregate that `apply` would apply, in float64.

        Buffers are left out, and nothing changes. Arguments are those of `apply`.
        """
        spec = self.declared.spec(optimizer, spec_digest)
        chunk = self.vectors.chunk(chunk_index)
        gradients, _ = self._buffers.part(chunk, contributions)
        divisor = None if spec.loss_is_sum else total_weight
        mean = self._aggregate(chunk, gradients, divisor)
        return square_sum(self._optimizers.within(spec, chunk, mean).gradient)

    def products(
        self,
        chunk_index: int,
        contributions: Sequence[Contribution],
        worker_ids: Sequence[str],
        *,
        optimizer: str,
        has_pairs: bool,
        spec_digest: str = "",
    ) -> tuple[float, ...]:
        """Inner products of the gradients of some workers, in a chunk, in float64.

        Args:
            chunk_index: The chunk.
            contributions: Of those that have sent it.
            worker_ids: All of them, in the order of the products.
            optimizer: As for `apply`.
            has_pairs: Whether also of each with those after it.
            spec_digest: As for `apply`.
        """
        spec = self.declared.spec(optimizer, spec_digest)
        chunk = self.vectors.chunk(chunk_index)
        gradients, _ = self._buffers.part(chunk, contributions)
        rows = {}
        for each in gradients:
            one = self._optimizers.within(spec, chunk, mean_of(chunk, [each], None))
            row = torch.zeros(chunk.element_count, dtype=one.gradient.dtype)
            rows[each.worker_id] = spread(chunk, one, row)
        sums = products_of([*rows.values()], has_pairs=has_pairs) if rows else []
        places = {worker_id: place for place, worker_id in enumerate(rows)}
        return tuple(
            sums[places[one]][places[other]]
            if one in places and other in places
            else 0.0
            for start, one in enumerate(worker_ids)
            for other in (worker_ids[start:] if has_pairs else (one,))
        )

    def encode(
        self,
        chunk_index: int,
        outer_field: int,
        *,
        presence: tuple[bool, ...] | None = None,
        reader: SentValues | None = None,
        sequence: int | None = 0,
        held_digest: int | None = None,
    ) -> Messages:
        """Messages with the values that a chunk has now; several where it has parts.

        Args:
            chunk_index: A chunk of this shard.
            outer_field: Field number of the chunk in a message.
            presence: Which slices; None for all.
            reader: What the worker that will compute with them was sent before, if
                they are for a member.
            sequence: The push that they answer. None for a worker that begins, or goes
                on after a loss: they go as they are.
            held_digest: Of the elements that it has; the same are not sent.
        """
        chunk = self.vectors.chunk(chunk_index)
        bits = (True,) * len(chunk.slices) if presence is None else presence
        with self._locks[chunk_index]:
            view = self.vectors.view(chunk_index)
            messages, seen = self._encoder.encode(
                chunk, view, outer_field, bits, reader, sequence, held_digest
            )
            if reader is not None and self._delay.compensation:
                reader.note_copy(chunk_index, seen())
            return messages

    def reference(
        self, chunk_index: int, presence: tuple[bool, ...] | None = None
    ) -> bytes | None:
        """A message that says where in shared memory values are; None: send them."""
        if self._delay.compensation:
            return None  # it must be known which values were read
        with self._locks[chunk_index]:
            return self.vectors.reference(chunk_index, presence)

    def export_state(
        self, optimizer: str, chunk_index: int, *, spec_digest: str = ""
    ) -> dict[StateKey, torch.Tensor]:
        """A copy of the state that an optimizer has of a chunk.

        None of an optimizer that another one has been put in place of since.

        Raises:
            Refusal: `OPTIMIZER_MISMATCH`.
        """
        spec = self.declared.spec(optimizer, spec_digest)
        with self._locks[chunk_index]:
            held = self._optimizers.held(optimizer, chunk_index)
            return held.export() if spec.goes_on_from(held.spec) else {}

    def check_state(
        self,
        optimizer: str,
        chunk_index: int,
        state: ChunkState,
        *,
        spec_digest: str = "",
    ) -> None:
        """Checks state of a chunk before it is staged; changes nothing.

        Raises:
            Refusal: `CHUNK_INVALID` or `OPTIMIZER_MISMATCH`.
        """
        chunk = self.vectors.chunk(chunk_index)
        spec = self.declared.spec(optimizer, spec_digest)
        known = self.declared.known_groups(spec)
        groups = [known.get(piece.entry_index) for piece in chunk.slices]
        check_state(spec, chunk, groups, state)

    def load_state(
        self,
        optimizer: str,
        states: Mapping[int, ChunkState],
        *,
        spec_digest: str = "",
    ) -> None:
        """Replaces an optimizer's state.

        Args:
            optimizer: Its name.
            states: By chunk, checked by `check_state`; others are without state.
            spec_digest: Declaration of the optimizer that goes on from it.
        """
        spec = self.declared.spec(optimizer, spec_digest)
        for chunk_index in self._locks:
            with self._changing(chunk_index):
                held = self._optimizers.under(spec, chunk_index)
                held.load(states.get(chunk_index, {}))

    def note_seeder(self, worker: SentValues) -> None:
        """The worker has all values as they are now: they are its own."""
        for chunk_index, lock in self._locks.items():
            with lock:
                view = self.vectors.view(chunk_index)
                if self._delay.compensation:
                    worker.note_copy(chunk_index, view)
                self._encoder.note_exact(self.vectors.chunk(chunk_index), view, worker)

    def begin_seed(self) -> None:
        """Makes room for first values, dropping any that are staged."""
        self._seed = _Seed(self.vectors.fresh())

    def write_seed(self, chunk_index: int, data: memoryview) -> None:
        """Stages first values of a chunk.

        Raises:
            Refusal: `CHUNK_INVALID`; nothing is written.
        """
        self._staged().vectors.write(chunk_index, data)

    def write_seed_state(
        self, optimizer: str, states: Mapping[int, ChunkState]
    ) -> None:
        """Stages first state of an optimizer, checked by `check_state`."""
        name = self.declared.spec(optimizer).name
        self._staged().states[name] = {
            chunk_index: HeldState("", state) for chunk_index, state in states.items()
        }

    def write_seed_image(self, chunk_index: int, image: ChunkImage) -> None:
        """Stages all that an image has of a chunk.

        Args:
            chunk_index: The chunk.
            image: Of a chunk of this size and type; masters and state are kept.

        Raises:
            Refusal: As `check_state`; nothing is written.
        """
        for optimizer, held in image.states.items():
            digest = held.spec_digest
            self.check_state(optimizer, chunk_index, held.state, spec_digest=digest)
        seed = self._staged()
        seed.vectors.write(chunk_index, buffer_of(image.values))
        if image.master is not None and any(self._optimizers.updatable(chunk_index)):
            seed.masters[chunk_index] = image.master
        for optimizer, held in image.states.items():
            seed.states.setdefault(optimizer, {})[chunk_index] = held

    def commit_seed(self) -> None:
        """Makes current what is staged."""
        seed, self._seed = self._staged(), None
        self._install(seed, is_seeded=True)
        for optimizer, chunks in seed.states.items():
            for chunk_index, held in chunks.items():
                spec = self.declared.spec(optimizer, held.spec_digest)
                self._optimizers.under(spec, chunk_index).load(held.state)

    def image_of(self, chunk_index: int) -> ChunkImage:
        """A copy of all that there is of a chunk.

        What workers were sent before is not in it, nor which buffers have changed: who
        goes on from it pulls all values first.
        """
        with self._locks[chunk_index]:
            return self._copied(chunk_index)

    def begin_image(
        self,
        *,
        values_only: bool = False,
        into: Mapping[int, ChunkImage] = MappingProxyType({}),
    ) -> PendingImage[ChunkImage]:
        """An image of all chunks as they are now, of which none is copied yet.

        Until `end_image` each chunk is copied before it is changed. Nothing is being
        applied at the moment. An image that is still being copied is abandoned.

        Args:
            values_only: Whether masters and optimizer state are left out.
            into: Chunks that are not needed any more, whose memory the image takes.
        """
        if self._pending is not None:
            self._pending.abandon("a newer cut has taken its place")
        spare = dict(into)

        def copy(chunk_index: int) -> ChunkImage:
            if values_only:
                return ChunkImage(self.vectors.view(chunk_index).clone())
            return self._copied(chunk_index, spare.pop(chunk_index, None))

        self._pending = PendingImage(self._locks, copy)
        return self._pending

    def copy_image(self, image: PendingImage[ChunkImage]) -> None:
        """Copies what is owed of an image; updates go on meanwhile.

        From the first chunk on: steps mostly come from the last one down, so that the
        two meet once.
        """
        for chunk_index, lock in self._locks.items():
            with lock:
                image.take(chunk_index)

    def end_image(self, image: PendingImage[ChunkImage]) -> None:
        """An image is copied, or abandoned. Not while another one begins."""
        if self._pending is image:
            self._pending = None

    def step_counts(self, optimizer: str, entry_index: int) -> tuple[int, ...]:
        """Updates so far of each of an entry's slices on this shard."""
        return self._optimizers.step_counts(optimizer, entry_index)

    def run_count(self, optimizer: str, chunk_index: int) -> int:
        """Runs of a chunk: what an update of it costs beside its bytes."""
        return self._optimizers.held(optimizer, chunk_index).run_count

    def _aggregate(
        self, chunk: Chunk, gradients: Sequence[Contribution], divisor: float | None
    ) -> Mean:
        if self._aggregation.rule.is_coordinatewise:
            assert divisor is not None, "such a job adds no gradients up"
            return coordinatewise(self._aggregation, chunk, gradients, divisor)
        return finite_mean(chunk, gradients, divisor)

    @contextmanager
    def _changing(self, chunk_index: int) -> Iterator[None]:
        """Holds a chunk's lock to change it. An image that owes it copies it first."""
        with self._locks[chunk_index]:
            if self._pending is not None:
                self._pending.take(chunk_index)
            yield

    def _copied(self, chunk_index: int, into: ChunkImage | None = None) -> ChunkImage:
        values = self.vectors.view(chunk_index)
        into = into or ChunkImage(values[:0])
        states = {}
        for name in self.declared.first:
            held = self._optimizers.held(name, chunk_index)
            spare = into.states.get(name)
            if state := held.export(spare.state if spare is not None else {}):
                digest = self.declared.digest_of(held.spec)
                states[name] = HeldState(digest, state)
        return ChunkImage(
            values=copy_of(values, into.values),
            master=self._masters.copy(chunk_index, into.master),
            states=states,
        )

    def _install(self, seed: _Seed, *, is_seeded: bool) -> None:
        self.vectors = seed.vectors
        self._masters = MasterValues(
            seed.vectors, is_seeded=is_seeded, masters=seed.masters
        )
        self._buffers = ShardBuffers(self._schema, self._chunks)
        self._optimizers = ShardOptimizers(
            self.declared,
            self._chunks,
            self._updated,
        )

    def _compensated(
        self, chunk: Chunk, mean: Mean, pusher: SentValues
    ) -> torch.Tensor:
        """The mean for the values of now; as it is when that would not be finite."""
        pulled = pusher.copy_of(chunk.index)
        if pulled is None:
            return mean.gradient
        now = self._masters.of(chunk.index)
        if mean.positions:
            now = elements_of(now, chunk, mean.presence, mean.positions)
            pulled = elements_of(pulled, chunk, mean.presence, mean.positions)
        elif not all(mean.presence):
            runs = list(present_runs(chunk, mean.presence))
            now = torch.cat([now[start:stop] for start, stop in runs])
            pulled = torch.cat([pulled[start:stop] for start, stop in runs])
        found = compensated(mean.gradient, now, pulled, self._delay.compensation)
        return found if is_finite(found) else mean.gradient

    def _updated(self, chunk: Chunk, members: Collection[int]) -> torch.Tensor:
        """What an optimizer updates; frozen chunks of 16 bits have no masters."""
        if any(piece.entry_index in members for piece in chunk.slices):
            return self._masters.of(chunk.index)
        return self.vectors.view(chunk.index)

    def _staged(self) -> _Seed:
        assert self._seed is not None, "begin_seed comes first"
        return self._seed


def _union(*presences: tuple[bool, ...]) -> tuple[bool, ...]:
    return tuple(any(bits) for bits in zip(*presences, strict=True))
