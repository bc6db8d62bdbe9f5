"""Optimizers as workers have declared them: those of `prepare`, and later ones.

A push says by which declaration it was made. Declarations stay, since a worker that
joins late begins with the first ones.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from psserver.shard.tensors.supported_optimizers import make_optimizer
from pswire.optimizers import SUPPORTED, check_values
from pswire.placement import Chunk
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import (
    ElementType,
    EntryKind,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
)


class DeclaredOptimizers:
    """What a shard knows of its job's optimizers.

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
