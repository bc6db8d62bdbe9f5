"""The optimizers of a shard: as declared, and at work on the state of every chunk.

Updates of one chunk are serialised by the caller; different chunks are independent.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from psserver.shard.tensors.aggregate import Mean, within
from psserver.shard.tensors.chunk_image import copy_of
from psserver.shard.tensors.chunk_optimizer import ChunkOptimizer
from psserver.shard.tensors.shard_vectors import (
    ShardVectors,
    memory_refusal,
    present_runs,
)
from psserver.shard.tensors.supported_optimizers import make_optimizer
from pswire.optimizers import SUPPORTED, SparseGradients, check_values
from pswire.placement import Chunk
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import (
    NARROW_TYPES,
    ElementType,
    EntryKind,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
)


class DeclaredOptimizers:
    """Optimizers as workers have declared them: those of `prepare`, and later ones.

    A push says by which declaration it was made. Declarations stay, since a worker that
    joins late begins with the first ones.

    Args:
        schema: Tensors of the job.
        optimizers: What is declared so far, of each name the first one first.

    Attributes:
        first: Of each optimizer its first declaration, by name.
        trained: Tensors that the job trains from the beginning: no step has values of
            them.

    Raises:
        Refusal: For an optimizer that this shard can't run.
    """

    def __init__(
        self, schema: ModelSchema, optimizers: Iterable[OptimizerSpec]
    ) -> None:
        self._schema = schema
        self.first: dict[str, OptimizerSpec] = {}
        self._specs: dict[str, dict[str, OptimizerSpec]] = {}
        # By id() of the declaration.
        self._groups: dict[int, dict[int, int]] = {}
        self._known_groups: dict[int, dict[int, ParameterGroup]] = {}
        for spec in optimizers:
            self.declare(spec)
        self.trained = frozenset(
            index for spec in self.first.values() for index in spec.entry_indexes
        )

    def declare(self, spec: OptimizerSpec) -> None:
        """Takes one more declaration; one that is known changes nothing.

        Raises:
            Refusal: This shard can't run it.
        """
        if self.has(spec.name, spec.digest):
            return
        check_optimizer(spec)
        check_entries(self._schema, spec)
        self.first.setdefault(spec.name, spec)
        self._specs.setdefault(spec.name, {})[spec.digest] = spec
        self._known_groups.clear()
        self._groups[id(spec)] = {
            entry_index: position
            for position, group in enumerate(spec.groups)
            for entry_index in group.entry_indexes
        }

    def has(self, name: str, digest: str) -> bool:
        """Whether a declaration is known; an empty digest is that of the first one."""
        specs = self._specs.get(name, {})
        return bool(specs) if not digest else digest in specs

    def spec(self, name: str, digest: str = "") -> OptimizerSpec:
        """A declaration of an optimizer.

        Raises:
            Refusal: `OPTIMIZER_MISMATCH`.
        """
        specs = self._specs.get(name)
        if specs is None:
            raise Refusal(
                ErrorReason.OPTIMIZER_MISMATCH,
                f"the job has no optimizer {name[:64]!r}; it has "
                + ", ".join(repr(each[:64]) for each in self._specs),
            )
        if not digest:
            return self.first[name]
        if digest not in specs:
            raise Refusal(
                ErrorReason.OPTIMIZER_MISMATCH,
                f"{name[:64]!r} was never declared as {digest[:64]!r}",
            )
        return specs[digest]

    def digest_of(self, spec: OptimizerSpec) -> str:
        """Names a declaration, which is one of these; empty for the first one."""
        specs = self._specs[spec.name]
        found = next(digest for digest, each in specs.items() if each is spec)
        return "" if spec is self.first[spec.name] else found

    def check_hyperparameters(
        self,
        name: str,
        hyperparameters: Sequence[Sequence[float]],
        *,
        spec_digest: str = "",
    ) -> None:
        """Checks a trailer's hyperparameters before it is staged.

        Raises:
            Refusal: `HYPERPARAMETER_INVALID` or `OPTIMIZER_MISMATCH`.
        """
        check_hyperparameters(self.spec(name, spec_digest), hyperparameters)

    def all_of(self, name: str) -> Collection[OptimizerSpec]:
        """All declarations of an optimizer, the newest one last."""
        return self._specs[name].values()

    def is_alone(self, name: str) -> bool:
        """Whether there is but one declaration of an optimizer."""
        return len(self._specs[name]) == 1

    def group_of(self, spec: OptimizerSpec) -> Mapping[int, int]:
        """Group of each entry that a declaration has, which is one of these."""
        return self._groups[id(spec)]

    def known_groups(self, spec: OptimizerSpec) -> Mapping[int, ParameterGroup]:
        """Of each entry that has state under a declaration the group that it was in.

        Those that an earlier declaration had and this one lacks keep theirs, as torch
        keeps the state of a parameter that is taken out of its group.
        """
        known = self._known_groups.get(id(spec))
        if known is None:
            alike = filter(spec.goes_on_from, self._specs[spec.name].values())
            known = self._known_groups[id(spec)] = {
                entry_index: group
                for each in (*alike, spec)
                for group in each.groups
                for entry_index in group.entry_indexes
            }
        return known

    def memberships(
        self, chunks: Iterable[Chunk], name: str = ""
    ) -> dict[int, tuple[bool, ...]]:
        """By chunk, slices that some declaration has, of all optimizers or of one."""
        entries = {
            entry_index
            for own, specs in self._specs.items()
            if not name or own == name
            for spec in specs.values()
            for entry_index in self.group_of(spec)
        }
        return {
            chunk.index: tuple(piece.entry_index in entries for piece in chunk.slices)
            for chunk in chunks
        }


def check_hyperparameters(
    spec: OptimizerSpec, hyperparameters: Sequence[Sequence[float]]
) -> None:
    """Checks the hyperparameters of all groups of a push.

    Raises:
        Refusal: `HYPERPARAMETER_INVALID` naming the group and value, or
            `OPTIMIZER_MISMATCH` for another number of groups.
    """
    if len(hyperparameters) != len(spec.groups):
        raise Refusal(
            ErrorReason.OPTIMIZER_MISMATCH,
            f"{spec.name!r} has {len(spec.groups)} parameter groups, the push names "
            f"{len(hyperparameters)}",
        )
    for group, values in zip(spec.groups, hyperparameters, strict=True):
        check_values(
            spec.class_name,
            spec.hyperparameter_names,
            values,
            declared=group.hyperparameters,
        )


def check_optimizer(spec: OptimizerSpec) -> None:
    """Checks that this shard's torch can run an optimizer as declared.

    Raises:
        Refusal: `OPTIMIZER_UNSUPPORTED` or `HYPERPARAMETER_INVALID`.
    """
    known = make_optimizer(spec.class_name, ElementType.FLOAT32).defaults
    check_hyperparameters(spec, [group.hyperparameters for group in spec.groups])
    for position, each in enumerate(SUPPORTED[spec.class_name].hyperparameters):
        if each.name.partition(".")[0] in known:
            continue
        for group in spec.groups:
            if group.hyperparameters[position] != each.neutral:
                raise Refusal(
                    ErrorReason.OPTIMIZER_UNSUPPORTED,
                    f"the shard's torch {torch.__version__} has no {each.name} of "
                    f"{spec.class_name}",
                )


def check_entries(schema: ModelSchema, spec: OptimizerSpec) -> None:
    """Checks that an optimizer updates only parameters that there are, of floats.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    for group in spec.groups:
        for entry_index in group.entry_indexes:
            if not 0 <= entry_index < len(schema.entries):
                raise Refusal(
                    ErrorReason.MALFORMED_MESSAGE,
                    f"{spec.name[:64]!r} names tensor {entry_index}, the model has "
                    f"{len(schema.entries)}",
                )
            entry = schema.entries[entry_index]
            if entry.kind is EntryKind.BUFFER or not entry.element_type.is_floating:
                raise Refusal(
                    ErrorReason.MALFORMED_MESSAGE,
                    f"{spec.name[:64]!r} updates {entry.name[:64]!r}, which is "
                    f"{entry.described}",
                )


class MasterValues:
    """What the optimizers of a shard update.

    Args:
        vectors: The values that workers read.
        is_seeded: Whether they are other than zeros.
        masters: By chunk, masters that are known already; kept.
    """

    def __init__(
        self,
        vectors: ShardVectors,
        *,
        is_seeded: bool,
        masters: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._vectors = vectors
        self._is_seeded = is_seeded
        self._masters = dict(masters or {})

    @property
    def byte_count(self) -> int:
        """Bytes of all master values. May be asked for during an update."""
        return sum(master.nbytes for master in list(self._masters.values()))

    def of(self, chunk_index: int) -> torch.Tensor:
        """Elements of a chunk to be updated, 1-D; made when first asked for.

        Returns:
            The values themselves where their type is wide enough. Of 16 bits: masters,
            which are published by `publish`.

        Raises:
            Refusal: `LIMIT_EXCEEDED` when there is no memory for them.
        """
        values = self._vectors.view(chunk_index)
        if self._vectors.chunk(chunk_index).element_type not in NARROW_TYPES:
            return values
        if chunk_index not in self._masters:
            try:
                # Memory of zeros is not taken before it is written to.
                master = torch.zeros(values.numel(), dtype=torch.float32)
            except (MemoryError, RuntimeError) as error:
                raise memory_refusal(self._vectors) from error
            self._masters[chunk_index] = (
                master.copy_(values) if self._is_seeded else master
            )
        return self._masters[chunk_index]

    def copy(
        self, chunk_index: int, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """A copy of a chunk's masters; None where the values are updated.

        Args:
            chunk_index: The chunk.
            into: As for `copy_of`.
        """
        master = self._masters.get(chunk_index)
        return None if master is None else copy_of(master, into)

    def take(self, chunk: Chunk, presence: Sequence[bool]) -> None:
        """Goes on from the values of these slices, which were replaced."""
        master = self._masters.get(chunk.index)
        if master is None:
            return
        values = self._vectors.view(chunk.index)
        for start, stop in present_runs(chunk, presence):
            master[start:stop].copy_(values[start:stop])

    def publish(self, chunk: Chunk, presence: Sequence[bool]) -> None:
        """Publishes what an update has made of the present slices."""
        master = self._masters.get(chunk.index)
        if master is None:
            return
        values = self._vectors.view(chunk.index)
        for start, stop in present_runs(chunk, presence):
            values[start:stop].copy_(master[start:stop])


ValuesOf = Callable[[Chunk, Collection[int]], torch.Tensor]
"""Of a chunk and the entries that are updated: the elements to update."""


class ShardOptimizers:
    """Optimizers by name and chunk, each as it was declared for its last update."""

    def __init__(
        self,
        declared: DeclaredOptimizers,
        chunks: Sequence[Chunk],
        values_of: ValuesOf,
    ) -> None:
        """Begins without state, under the first declarations."""
        self._declared = declared
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self._values_of = values_of
        self._held = {
            name: {index: self._made(spec, index) for index in self._chunks}
            for name, spec in declared.first.items()
        }
        self._memberships: dict[str, dict[int, tuple[bool, ...]]] = {}
        self._updatable: dict[int, tuple[bool, ...]] = {}
        self.note_declared()

    @property
    def state_byte_count(self) -> int:
        """Bytes of all state. May be asked for during an update."""
        return sum(
            held.state_byte_count
            for chunks in list(self._held.values())
            for held in list(chunks.values())
        )

    def note_declared(self) -> None:
        """Something was declared: pushes may have other slices from now on."""
        chunks = self._chunks.values()
        self._memberships = {
            name: self._declared.memberships(chunks, name) for name in self._held
        }
        self._updatable = self._declared.memberships(chunks)

    def membership(self, name: str, chunk_index: int) -> tuple[bool, ...]:
        """Slices of a chunk that pushes of an optimizer may have."""
        return self._memberships[name][chunk_index]

    def updatable(self, chunk_index: int) -> tuple[bool, ...]:
        """Slices of a chunk that some optimizer has."""
        return self._updatable[chunk_index]

    def held(self, name: str, chunk_index: int) -> ChunkOptimizer:
        """An optimizer of a chunk, as it was declared for its last update."""
        return self._held[name][chunk_index]

    def under(self, spec: OptimizerSpec, chunk_index: int) -> ChunkOptimizer:
        """An optimizer of a chunk as it is declared here; nobody else updates it now.

        State goes on where groups were changed, also that of slices which this
        declaration lacks, and begins anew where another optimizer took the place.
        """
        held = self.held(spec.name, chunk_index)
        if held.spec is spec:
            return held
        made = self._made(spec, chunk_index)
        if spec.goes_on_from(held.spec):
            made.load(held.export())
        self._held[spec.name][chunk_index] = made
        return made

    def within(self, spec: OptimizerSpec, chunk: Chunk, mean: Mean) -> Mean:
        """What a declaration takes of pushes, of which some were made by others."""
        if self._declared.is_alone(spec.name):
            return mean
        members = self._declared.group_of(spec)
        is_sparse = SUPPORTED[spec.class_name].sparse is SparseGradients.REQUIRED
        membership = [
            piece.entry_index in members and (place in mean.positions or not is_sparse)
            for place, piece in enumerate(chunk.slices)
        ]
        return within(chunk, mean, membership)

    def step_counts(self, name: str, entry_index: int) -> tuple[int, ...]:
        """Updates so far of each of an entry's slices on this shard."""
        return tuple(
            held.step_count(position)
            for chunk_index, held in self._held[name].items()
            for position, piece in enumerate(self._chunks[chunk_index].slices)
            if piece.entry_index == entry_index
        )

    def _made(self, spec: OptimizerSpec, chunk_index: int) -> ChunkOptimizer:
        chunk = self._chunks[chunk_index]
        group_of = self._declared.group_of(spec)
        known = self._declared.known_groups(spec)
        values = self._values_of(chunk, known)
        return ChunkOptimizer(spec, chunk, group_of, values, stateful_entries=known)
