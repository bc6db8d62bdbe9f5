"""The one place where bytes of a caller become messages of the generated code.

What is not well formed becomes a `Refusal` here, whoever asks, and what would cost far
more memory than its bytes is refused before it is parsed. Parsing takes as long as a
message has fields: a large one is parsed by a thread, one after the other, while the
event loop goes on.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Final, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from pswire.limits import NAME_BYTES_MAX, PROTOCOL_VERSION
from pswire.membership import WorkerKey
from pswire.message_fields import Shape, check_field_count
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import coordinator_service_pb2, membership_pb2, push_pb2

Received = TypeVar("Received", bound=Message)
Result = TypeVar("Result")

FIELD_COUNT_MAX: Final = 65_536
"""Most fields of a message, with those within it and unknown ones. The longest honest
one names each worker of a job."""

LIST_FIELD_COUNT_MAX: Final = 524_288
"""Most fields of a message that lists tensors, parameter groups or data ranges: of a
part of a model with 60,000 tensors, or 65,536 ranges."""

LARGE_BYTES_MIN: Final = 64 << 10
"""From here on a message is parsed by the thread. A smaller one takes less than
changing to it and back, some 0.2 ms, or little more if it is hostile."""

_LISTING: Final[frozenset[Descriptor]] = frozenset(
    kind.DESCRIPTOR
    for kind in (
        coordinator_service_pb2.DeclareOptimizerRequest,
        coordinator_service_pb2.JoinRequest,
        coordinator_service_pb2.LeaseDataRequest,
        coordinator_service_pb2.LeaveRequest,
        coordinator_service_pb2.OpenEpochRequest,
        coordinator_service_pb2.ReportCutRequest,
        coordinator_service_pb2.ReportFenceRequest,
        push_pb2.PushTrailer,
    )
)

_VARINT_TYPES: Final = frozenset(
    {
        FieldDescriptor.CPPTYPE_BOOL,
        FieldDescriptor.CPPTYPE_ENUM,
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    }
)

# One thread: hostile messages then wait for each other, and not all others for them.
_thread: Final = ThreadPoolExecutor(1, thread_name_prefix="large messages")


def decode(kind: type[Received], data: bytes | memoryview) -> Received:
    """Parses a message.

    Raises:
        Refusal: `MALFORMED_MESSAGE`, or `LIMIT_EXCEEDED` with nothing parsed.
    """
    descriptor = kind.DESCRIPTOR
    is_listing = descriptor in _LISTING
    content = bytes(data)
    check_field_count(
        content,
        shape_of(descriptor),
        descriptor.name,
        count_max=LIST_FIELD_COUNT_MAX if is_listing else FIELD_COUNT_MAX,
    )
    try:
        return kind.FromString(content)
    except DecodeError:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE, f"a {descriptor.name} can't be parsed"
        ) from None


async def decoded(kind: type[Received], data: bytes | memoryview) -> Received:
    """Parses a message, a large one by the thread.

    Raises:
        Refusal: As `decode`.
    """
    return await parsed(len(data), partial(decode, kind, data))


async def parsed(byte_count: int, parse: Callable[[], Result]) -> Result:
    """What `parse` returns, called by the thread if it is about many bytes."""
    if byte_count >= LARGE_BYTES_MIN:
        try:
            parsing = asyncio.get_running_loop().run_in_executor(_thread, parse)
        except RuntimeError:  # no thread can be started, and a step must not wait
            return parse()
        return await parsing
    return parse()


def worker_key(identity: membership_pb2.WorkerIdentity) -> WorkerKey:
    """Reads an identity.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    size = len(identity.worker_id.encode())
    if not 0 < size <= NAME_BYTES_MAX or identity.incarnation < 1:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"worker {identity.worker_id[:64]!r}, incarnation "
            f"{identity.incarnation}, is no identity",
        )
    return WorkerKey(identity.worker_id, identity.incarnation)


def check_protocol(version: int) -> None:
    """Refuses another protocol version.

    Raises:
        Refusal: `PROTOCOL_VERSION`.
    """
    if version != PROTOCOL_VERSION:
        raise Refusal(
            ErrorReason.PROTOCOL_VERSION,
            f"the caller speaks protocol {version}, this server speaks "
            f"{PROTOCOL_VERSION}",
        )


@cache
def shape_of(descriptor: Descriptor) -> Shape:
    """What may be many in messages of a type."""
    shape: dict[int, Shape | None] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            shape[field.number] = shape_of(field.message_type)
        elif field.cpp_type in _VARINT_TYPES:
            shape[field.number] = None
    return shape
