"""What a job trains, as pure values.

Names are data: any UTF-8 of at most `NAME_BYTES_MAX` bytes, matched exactly, never
used as a path, a label or markup.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from pswire.limits import (
    DIMENSION_COUNT_MAX,
    ELEMENT_COUNT_MAX,
    ENTRY_COUNT_MAX,
    PLACEMENT_VERSION,
)
from pswire.names import check_name
from pswire.object_marks import ObjectMark, check_marks
from pswire.reasons import ErrorReason, Refusal


class ElementType(IntEnum):
    """Mirrors `pswire.v1.ElementType`, without the prefix."""

    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    INT64 = 5
    INT32 = 6
    INT16 = 7
    INT8 = 8
    UINT8 = 9
    BOOL = 10

    @property
    def byte_count(self) -> int:
        return _BYTE_COUNTS[self]

    @property
    def is_floating(self) -> bool:
        """Whether an optimizer can update it."""
        return self <= ElementType.BFLOAT16


_BYTE_COUNTS = {
    ElementType.FLOAT32: 4,
    ElementType.FLOAT64: 8,
    ElementType.FLOAT16: 2,
    ElementType.BFLOAT16: 2,
    ElementType.INT64: 8,
    ElementType.INT32: 4,
    ElementType.INT16: 2,
    ElementType.INT8: 1,
    ElementType.UINT8: 1,
    ElementType.BOOL: 1,
}


NARROW_TYPES = frozenset({ElementType.FLOAT16, ElementType.BFLOAT16})
"""Types of floats of 16 bits: sums and updates of them are made in float32."""


class EntryKind(IntEnum):
    """Mirrors `pswire.v1.EntryKind`, without the prefix."""

    PARAMETER = 1
    BUFFER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaEntry:
    """One tensor.

    Attributes:
        model: Name of the model it belongs to.
        name: Its name within the model, as torch spells it.
        shape: Sizes of its dimensions; empty for a 0-dim tensor.
        element_type: Type of its elements.
        kind: Parameter or buffer.
        tied_names: Further names of the same tensor.
        trainable: Whether it takes gradients now; not part of the digest.
    """

    model: str = "model"
    name: str
    shape: tuple[int, ...]
    element_type: ElementType
    kind: EntryKind = EntryKind.PARAMETER
    tied_names: tuple[str, ...] = ()
    trainable: bool = True

    @property
    def element_count(self) -> int:
        """Product of the shape; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def row_length(self) -> int:
        """Elements that an index of the first dimension selects; 1 for a 0-dim one."""
        return math.prod(self.shape[1:])

    @property
    def byte_count(self) -> int:
        return self.element_count * self.element_type.byte_count

    @property
    def described(self) -> str:
        """Kind, shape and type, such as `parameter [3, 4] float32`."""
        return (
            f"{self.kind.name.lower()} {list(self.shape)} "
            f"{self.element_type.name.lower()}"
        )

    @property
    def identity(self) -> tuple[object, ...]:
        """All that must agree between workers."""
        return (
            self.model,
            self.name,
            list(self.shape),
            int(self.element_type),
            int(self.kind),
            list(self.tied_names),
        )


INNER_STATE_MODEL: Final = "inner state"
"""The model of a job whose buffers are state of the workers' own optimizers. Snapshots
leave it out, and no script can name one so by keyword."""


@dataclass(frozen=True, slots=True)
class ModelSchema:
    """All tensors of a job, in the one order that placement uses.

    Attributes:
        entries: The tensors.
        marks: What tells models and loaders apart; not part of the digest.
    """

    entries: tuple[SchemaEntry, ...]
    marks: tuple[ObjectMark, ...] = field(default=(), compare=False)

    def validate(self) -> None:
        """Checks what a hostile client could get wrong.

        Raises:
            Refusal: `LIMIT_EXCEEDED` or `MALFORMED_MESSAGE`, naming the entry.
        """
        if len(self.entries) > ENTRY_COUNT_MAX:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the model has {len(self.entries)} tensors, the limit is "
                f"{ENTRY_COUNT_MAX}",
            )
        check_marks(self.marks)
        seen: set[tuple[str, str]] = set()
        element_count = 0
        for entry in self.entries:
            _check_entry(entry)
            for name in (entry.name, *entry.tied_names):
                if (entry.model, name) in seen:
                    raise Refusal(
                        ErrorReason.MALFORMED_MESSAGE,
                        f"tensor {name[:64]!r} of {entry.model[:64]!r} is declared "
                        "twice: a name, also a tied one, is of one tensor, once",
                        cure="list each name with the one tensor that it is of",
                    )
                seen.add((entry.model, name))
            element_count += entry.element_count
        if element_count > ELEMENT_COUNT_MAX:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the model declares {element_count} elements, the limit is "
                f"{ELEMENT_COUNT_MAX}",
            )

    def digest(self) -> str:
        """SHA-256 of all that must agree between workers, in hex."""
        text = json.dumps(
            [PLACEMENT_VERSION, [list(entry.identity) for entry in self.entries]],
            ensure_ascii=True,
            separators=(",", ":"),
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def order_of(self, other: "ModelSchema") -> tuple[int, ...] | None:
        """Position here of each entry of `other`; None where the entries differ.

        Entries are matched by their names, of which a tied one has several: a module
        that is filled from a set registers them in another order in each process.
        """
        positions = {
            _match_key(entry): position for position, entry in enumerate(self.entries)
        }
        if len(other.entries) != len(self.entries):
            return None
        found = [positions.get(_match_key(entry)) for entry in other.entries]
        order = tuple(position for position in found if position is not None)
        return order if len(set(order)) == len(found) else None

    def differences(self, other: "ModelSchema") -> list[str]:
        """Lines that say how `other` differs, by name; empty when it does not.

        Entries are matched by name, in whatever order they come.
        """
        mine = {(entry.model, entry.name): entry for entry in self.entries}
        theirs = {(entry.model, entry.name): entry for entry in other.entries}
        lines = list(_entry_differences(mine, theirs))
        models = [sorted({model for model, _ in each}) for each in (mine, theirs)]
        if all(models) and models[0] != models[1]:
            lines.insert(
                0,
                f"! the models are {', '.join(models[0])} in the job, "
                f"{', '.join(models[1])} here: give prepare() the same models, under "
                "the same names, on all workers",
            )
        return lines


def _match_key(entry: SchemaEntry) -> tuple[object, ...]:
    names = frozenset((entry.name, *entry.tied_names))
    return entry.model, names, entry.shape, entry.element_type, entry.kind


def _check_entry(entry: SchemaEntry) -> None:
    check_name("model", entry.model)
    for name in (entry.name, *entry.tied_names):
        check_name("tensor", name)
    if len(entry.shape) > DIMENSION_COUNT_MAX:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"tensor {entry.name[:64]!r} has {len(entry.shape)} dimensions, the limit "
            f"is {DIMENSION_COUNT_MAX}",
        )
    if any(size < 0 for size in entry.shape):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"tensor {entry.name[:64]!r} has a negative size",
        )


def _label(entry: SchemaEntry) -> str:
    """Its full name, escaped if a terminal would do more than print it."""
    label = f"{entry.model}.{entry.name}"
    return label if label.isprintable() else ascii(label)


def _entry_differences(
    mine: dict[tuple[str, str], SchemaEntry], theirs: dict[tuple[str, str], SchemaEntry]
) -> Iterator[str]:
    for key, entry in mine.items():
        label = _label(entry)
        if key not in theirs:
            yield f"- {label}: {entry.described} (only in the job)"
        elif entry.identity != theirs[key].identity:
            other = theirs[key]
            if entry.described != other.described:
                yield f"! {label}: {entry.described} in the job, {other.described} here"
            else:
                yield (
                    f"! {label}: tied to {list(entry.tied_names)} in the job, "
                    f"to {list(other.tied_names)} here"
                )
    for key, entry in theirs.items():
        if key not in mine:
            yield f"+ {_label(entry)}: {entry.described} (only here)"


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One parameter group.

    Attributes:
        entry_indexes: Positions of its parameters in the schema.
        hyperparameters: Values in the order of `hyperparameter_names`.
    """

    entry_indexes: tuple[int, ...]
    hyperparameters: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer as a shard rebuilds it.

    Attributes:
        name: Its name in the job.
        class_name: Its class in `torch.optim`.
        hyperparameter_names: Names of the values of each group.
        groups: Its groups, in the user's order.
        exchange_count: How often the script has put another optimizer in its place.
        loss_is_sum: Whether the loss is a sum over its batch and no mean, so that
            gradients are added up. The same in all its declarations.
    """

    name: str
    class_name: str
    hyperparameter_names: tuple[str, ...]
    groups: tuple[ParameterGroup, ...]
    exchange_count: int = 0
    loss_is_sum: bool = False

    @property
    def entry_indexes(self) -> list[int]:
        """Positions in the schema of all its parameters, group by group."""
        return [index for group in self.groups for index in group.entry_indexes]

    @property
    def digest(self) -> str:
        """Tells declarations of one optimizer apart; values of groups are not in it.

        Nor is the order of a group's parameters, which differs with that of
        registration and changes no number.
        """
        what = [
            self.class_name,
            self.exchange_count,
            self.hyperparameter_names,
            [sorted(group.entry_indexes) for group in self.groups],
        ]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]

    def goes_on_from(self, other: "OptimizerSpec") -> bool:
        """Whether state of another declaration holds for this one: groups were added.

        An optimizer that was put in place of another begins without, as in torch.
        """
        mine = (self.class_name, self.exchange_count)
        return mine == (other.class_name, other.exchange_count)
