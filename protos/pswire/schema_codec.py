"""A job's terms, its schema and optimizers, to protobuf and back.

A model of 200,000 tensors takes some 10 MiB. It goes in parts, each a message of the
same type, that the receiver merges as protobuf merges: repeated fields grow.

What comes back is checked as far as the contract goes: known enums, indexes in range,
counts that agree. Whether a shard can run an optimizer is the shard's to say.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypedDict, TypeVar

from pswire.compression import Compression
from pswire.job_terms import JobTerms
from pswire.limits import ENTRY_COUNT_MAX, GROUP_COUNT_MAX, MODEL_BYTES_MAX
from pswire.names import check_name
from pswire.object_marks import ObjectMark
from pswire.privacy import Privacy
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import (
    ElementType,
    EntryKind,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from pswire.v1 import coordinator_service_pb2, schema_pb2
from pswire.v1 import coordinator_service_pb2 as pb


class TermsFields(TypedDict):
    """Fields of every message that carries a job's terms."""

    schema: schema_pb2.ModelSchema
    optimizers: list[schema_pb2.OptimizerSpec]
    clip_grad_norm: float
    compression: str
    privacy: schema_pb2.Privacy | None
    strategy: str


def terms_fields(terms: JobTerms) -> TermsFields:
    """Writes terms, for any message that has the fields.

    Raises:
        Refusal: As the other side would refuse them.
    """
    return {
        "schema": schema_to_message(terms.schema),
        "optimizers": [optimizer_to_message(spec) for spec in terms.optimizers],
        "clip_grad_norm": terms.clip_grad_norm,
        "compression": str(terms.compression),
        "privacy": None if terms.privacy is None else _privacy_message(terms.privacy),
        "strategy": terms.strategy,
    }


def read_terms(
    message: coordinator_service_pb2.JoinRequest | coordinator_service_pb2.ShardView,
) -> JobTerms:
    """Reads terms, of any message that has the fields.

    Raises:
        Refusal: `MALFORMED_MESSAGE`, or what else makes them useless.
    """
    schema = schema_from_message(message.schema)
    if message.strategy:
        check_name("strategy", message.strategy)
    return JobTerms(
        schema=schema,
        optimizers=tuple(
            optimizer_from_message(spec, schema) for spec in message.optimizers
        ),
        clip_grad_norm=message.clip_grad_norm,
        compression=Compression.parse(message.compression),
        privacy=_read_privacy(message.privacy) if message.HasField("privacy") else None,
        strategy=message.strategy,
    )


def checked_terms(terms: JobTerms) -> JobTerms:
    """Terms from elsewhere than a message, checked as those of one.

    Raises:
        Refusal: As `read_terms`.
        ValueError: A number or a text does not go into a message.
        TypeError: Something is no number, or no text.
    """
    return read_terms(coordinator_service_pb2.JoinRequest(**terms_fields(terms)))


def _privacy_message(privacy: Privacy) -> schema_pb2.Privacy:
    return schema_pb2.Privacy(
        noise_multiplier=privacy.noise_multiplier,
        max_grad_norm=privacy.max_grad_norm,
        delta=privacy.delta,
        epsilons=privacy.epsilons,
    )


def _read_privacy(message: schema_pb2.Privacy) -> Privacy:
    privacy = Privacy(
        noise_multiplier=message.noise_multiplier,
        max_grad_norm=message.max_grad_norm,
        delta=message.delta,
        epsilons=tuple(message.epsilons),
    )
    privacy.check()
    return privacy


def schema_to_message(schema: ModelSchema) -> schema_pb2.ModelSchema:
    """Validates a schema and converts it to its message.

    Raises:
        Refusal: As the other side would refuse it.
    """
    schema.validate()
    return schema_pb2.ModelSchema(
        entries=[
            schema_pb2.SchemaEntry(
                model=entry.model,
                name=entry.name,
                shape=entry.shape,
                element_type=schema_pb2.ElementType.ValueType(entry.element_type),
                kind=schema_pb2.EntryKind.ValueType(entry.kind),
                tied_names=entry.tied_names,
                trainable=entry.trainable,
            )
            for entry in schema.entries
        ],
        marks=[
            schema_pb2.ObjectMark(
                kind=mark.kind,
                name=mark.name,
                described=mark.described,
                structure=mark.structure,
                content=mark.content,
                named=mark.named,
            )
            for mark in schema.marks
        ],
    )


def schema_from_message(message: schema_pb2.ModelSchema) -> ModelSchema:
    """Reads and validates a schema.

    Raises:
        Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`, naming the entry.
    """
    schema = ModelSchema(
        tuple(_entry_from_message(item) for item in message.entries),
        tuple(
            ObjectMark(
                kind=mark.kind,
                name=mark.name,
                described=mark.described,
                structure=mark.structure,
                content=mark.content,
                named=mark.named,
            )
            for mark in message.marks
        ),
    )
    schema.validate()
    return schema


def _entry_from_message(message: schema_pb2.SchemaEntry) -> SchemaEntry:
    # A newer peer's value is a plain int here, like the zero of one that forgot it.
    if message.element_type not in _ELEMENT_TYPES:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"tensor {message.name[:64]!r} has the element type "
            f"{message.element_type}, known are {_listed(_ELEMENT_TYPES)}",
        )
    if message.kind not in _ENTRY_KINDS:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"tensor {message.name[:64]!r} has the kind {message.kind}, known are "
            f"{_listed(_ENTRY_KINDS)}",
        )
    return SchemaEntry(
        model=message.model,
        name=message.name,
        shape=tuple(message.shape),
        element_type=_ELEMENT_TYPES[message.element_type],
        kind=_ENTRY_KINDS[message.kind],
        tied_names=tuple(message.tied_names),
        trainable=message.trainable,
    )


_ELEMENT_TYPES: dict[int, ElementType] = {int(item): item for item in ElementType}
_ENTRY_KINDS: dict[int, EntryKind] = {int(item): item for item in EntryKind}


def _listed(items: dict[int, ElementType] | dict[int, EntryKind]) -> str:
    return ", ".join(f"{value} ({item.name.lower()})" for value, item in items.items())


def optimizer_to_message(spec: OptimizerSpec) -> schema_pb2.OptimizerSpec:
    return schema_pb2.OptimizerSpec(
        name=spec.name,
        class_name=spec.class_name,
        hyperparameter_names=spec.hyperparameter_names,
        groups=[
            schema_pb2.ParameterGroup(
                entry_indexes=group.entry_indexes,
                hyperparameters=schema_pb2.GroupHyperparameters(
                    values=group.hyperparameters
                ),
            )
            for group in spec.groups
        ],
        exchange_count=spec.exchange_count,
        loss_is_sum=spec.loss_is_sum,
    )


def optimizer_from_message(
    message: schema_pb2.OptimizerSpec, schema: ModelSchema
) -> OptimizerSpec:
    """Reads an optimizer over a schema.

    Values are taken as they are: which are finite and allowed depends on the class.

    Raises:
        Refusal: `MALFORMED_MESSAGE`, naming the optimizer and the group.
    """
    names = tuple(message.hyperparameter_names)
    label = f"optimizer {message.name[:64]!r}"
    check_name("optimizer", message.name)
    if not message.class_name:
        raise Refusal(ErrorReason.MALFORMED_MESSAGE, f"{label} has no class")
    if len(set(names)) != len(names):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE, f"{label} names a hyperparameter twice"
        )
    check_group_count(len(message.groups), label)
    seen: set[int] = set()
    groups = []
    for position, group in enumerate(message.groups):
        where = f"group {position} of {label}"
        _check_entries(group.entry_indexes, schema, seen, where)
        values = tuple(group.hyperparameters.values)
        if len(values) != len(names):
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"{where} has {len(values)} hyperparameters, expected {len(names)}",
            )
        groups.append(ParameterGroup(tuple(group.entry_indexes), values))
    return OptimizerSpec(
        name=message.name,
        class_name=message.class_name,
        hyperparameter_names=names,
        groups=tuple(groups),
        exchange_count=message.exchange_count,
        loss_is_sum=message.loss_is_sum,
    )


def check_group_count(count: int, label: str) -> None:
    """Checks that the settings of all groups fit the trailer of a push.

    Raises:
        Refusal: `LIMIT_EXCEEDED`, naming the optimizer.
    """
    if count > GROUP_COUNT_MAX:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"{label} has {count} parameter groups, the limit is {GROUP_COUNT_MAX}",
            cure="put parameters with the same settings into one group",
        )


def _check_entries(
    indexes: Sequence[int], schema: ModelSchema, seen: set[int], where: str
) -> None:
    """Checks a group's parameters, adding them to those `seen` in the optimizer."""
    for index in indexes:
        if not 0 <= index < len(schema.entries):
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"{where} refers to tensor {index}, the model has "
                f"{len(schema.entries)}",
            )
        entry = schema.entries[index]
        if entry.kind is not EntryKind.PARAMETER:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"{where} refers to {entry.name[:64]!r}, which is a buffer",
            )
        if index in seen:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"{where} refers to {entry.name[:64]!r}, which a group has already",
            )
        seen.add(index)


PART_BYTES: Final = 1 << 20
"""Where a part ends. One that is a single large optimizer may be larger: with
`GROUP_COUNT_MAX` groups it still fits a message."""

LISTED_COUNT_MAX: Final = 4 * GROUP_COUNT_MAX
"""Most optimizers, parameter groups, names of hyperparameters and loaders together. An
empty one takes 2 bytes of a message and up to 80 in memory."""

Described = TypeVar(
    "Described", pb.JoinRequest, pb.ShardView, pb.RequestSnapshotResponse
)


def cut_model(message: Described) -> Iterator[Described]:
    """Cuts a message that describes a model into parts; a small one is the only part.

    Args:
        message: The whole. Its tensors and optimizers move into the parts.

    Raises:
        Refusal: `LIMIT_EXCEEDED`, before the first part, for what no receiver takes.
    """
    size = message.ByteSize()
    _check_size(size)
    if size <= PART_BYTES:
        yield message
        return
    items: list[schema_pb2.SchemaEntry | schema_pb2.OptimizerSpec] = []
    items += message.schema.entries
    del message.schema.entries[:]
    if not isinstance(message, pb.RequestSnapshotResponse):
        items += message.optimizers
        del message.optimizers[:]
    part, size = message, message.ByteSize()
    for item in items:
        item_size = item.ByteSize()
        if size + item_size > PART_BYTES:
            yield part
            part, size = type(message)(), 0
        size += item_size
        if isinstance(item, schema_pb2.SchemaEntry):
            part.schema.entries.append(item)
        elif not isinstance(part, pb.RequestSnapshotResponse):
            part.optimizers.append(item)
    yield part


class MergedModel(Generic[Described]):
    """Parts that come, merged.

    Attributes:
        message: What has come so far.
    """

    def __init__(self, first: Described) -> None:
        self.message: Described = first
        self._size = 0
        self._listed_count = 0
        self._check(first)

    def add(self, part: Described) -> None:
        """Takes the next part.

        Raises:
            Refusal: `LIMIT_EXCEEDED`: it is more than a model may take.
        """
        self._check(part)
        self.message.MergeFrom(part)

    def _check(self, part: Described) -> None:
        self._size += part.ByteSize()
        _check_size(self._size)
        # Now, not when all is there: an empty tensor takes 2 bytes there and 100 here.
        count = len(self.message.schema.entries)
        if part is not self.message:
            count += len(part.schema.entries)
        if count > ENTRY_COUNT_MAX:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the model has {count} tensors or more, the limit is "
                f"{ENTRY_COUNT_MAX}",
            )
        self._listed_count += _listed_count(part)
        if self._listed_count > LISTED_COUNT_MAX:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the model has {self._listed_count} optimizers, parameter groups, "
                f"hyperparameters and loaders or more, the limit is {LISTED_COUNT_MAX}",
            )


def _listed_count(part: Described) -> int:
    if isinstance(part, pb.RequestSnapshotResponse):
        return 0
    count = len(part.loaders) if isinstance(part, pb.JoinRequest) else 0
    return count + sum(
        1 + len(optimizer.groups) + len(optimizer.hyperparameter_names)
        for optimizer in part.optimizers
    )


def _check_size(size: int) -> None:
    if size > MODEL_BYTES_MAX:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"names, shapes and optimizers of the model take {size >> 20} MiB, the "
            f"limit is {MODEL_BYTES_MAX >> 20} MiB",
            cure="shorten the names of its tensors, or train it as fewer, larger ones",
        )
