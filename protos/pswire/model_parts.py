"""What a job trains, in messages that each stay within the limit.

A model of 200,000 tensors takes some 10 MiB. It goes in parts, each a message of the
same type, that the receiver merges as protobuf merges: repeated fields grow.
"""

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from pswire.limits import ENTRY_COUNT_MAX, GROUP_COUNT_MAX, MODEL_BYTES_MAX
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import coordinator_service_pb2 as pb
from pswire.v1 import schema_pb2

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
