"""Frames by hand against the generated code, and against hostile bytes."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import xxhash
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pswire import frames
from pswire.frames import ChunkFrame
from pswire.message_fields import varint
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import parameter_service_pb2 as service_pb2
from pswire.v1 import push_pb2

Read = TypeVar("Read")

checked = settings(derandomize=True, deadline=None, max_examples=300)

OUTER: dict[str, tuple[type[Message], int]] = {
    "PushPullRequest": (service_pb2.PushPullRequest, frames.REQUEST_CHUNK_FIELD),
    "PushRequest": (service_pb2.PushRequest, frames.REQUEST_CHUNK_FIELD),
    "PushPullResponse": (service_pb2.PushPullResponse, frames.RESPONSE_CHUNK_FIELD),
    "PullResponse": (service_pb2.PullResponse, frames.RESPONSE_CHUNK_FIELD),
    "PullSnapshotResponse": (
        service_pb2.PullSnapshotResponse,
        frames.RESPONSE_CHUNK_FIELD,
    ),
    "SeedRequest": (service_pb2.SeedRequest, frames.SEED_CHUNK_FIELD),
}

GRADIENT_MESSAGES = (service_pb2.PushPullRequest, service_pb2.PushRequest)

fixed32 = st.integers(0, 2**32 - 1)
fixed64 = st.integers(0, 2**64 - 1)
# Lengths at which one of the varints around the payload grows by a byte.
payloads = st.one_of(
    st.binary(max_size=40),
    st.integers(60, 160).map(bytes),
    st.integers(16_330, 16_400).map(bytes),
    st.integers(2_097_100, 2_097_160).map(bytes),
)


@checked
@given(
    name=st.sampled_from(sorted(OUTER)),
    index=fixed32,
    part=fixed32,
    last=st.booleans(),
    encoding=st.integers(0, 2**31 - 1),
    digest=st.none() | fixed64,
    presence=st.binary(max_size=140),
    row_indices=st.binary(max_size=140),
    data=payloads,
)
@example("PushRequest", 0, 0, False, 0, 0, b"", b"", b"")
def test_a_chunk_has_the_bytes_of_the_generated_code(
    name: str,
    index: int,
    part: int,
    last: bool,
    encoding: int,
    digest: int | None,
    presence: bytes,
    row_indices: bytes,
    data: bytes,
) -> None:
    message_class, outer_field = OUTER[name]
    if message_class not in GRADIENT_MESSAGES:
        row_indices = b""
    message = frames.encode_chunk(
        outer_field,
        index=index,
        part=part,
        last=last,
        encoding=encoding,
        digest=digest,
        presence=presence,
        row_indices=row_indices,
        data=data,
    )

    parsed = message_class.FromString(message)
    chunk = parsed.chunk  # type: ignore[attr-defined]  # all of them have one
    rows = {"row_indices": row_indices} if message_class in GRADIENT_MESSAGES else {}
    covered = row_indices + data
    expected = type(chunk)(
        index=index,
        part=part,
        last=last,
        encoding=encoding,
        digest=xxhash.xxh3_64_intdigest(covered) if digest is None else digest,
        presence=presence,
        padding=bytes(len(chunk.padding)),
        data=data,
        **rows,
    )
    assert chunk == expected
    assert message == message_class(chunk=expected).SerializeToString()
    assert not data or (len(message) - len(data)) % frames.DATA_ALIGNMENT_BYTES == 0
    assert len(chunk.padding) < 33


gradient_chunks = st.builds(
    push_pb2.GradientChunk,
    index=fixed32,
    part=fixed32,
    last=st.booleans(),
    encoding=st.just(push_pb2.ENCODING_SPARSE_ROWS),
    digest=fixed64,
    presence=st.binary(max_size=20),
    row_indices=st.binary(max_size=20),
    padding=st.binary(max_size=20),
    data=st.binary(max_size=200),
)


@st.composite
def unknown_fields(draw: st.DrawFn) -> bytes:
    """Fields of a later release: numbers that `GradientChunk` does not have."""
    number = draw(st.integers(10, 2**29 - 1))
    wire_type = draw(st.sampled_from([0, 1, 2, 3, 5]))
    tag = varint(number << 3 | wire_type)
    if wire_type == 0:
        return tag + varint(draw(fixed64))
    if wire_type == 2:
        value = draw(st.binary(max_size=30))
        return tag + varint(len(value)) + value
    if wire_type == 3:
        return tag + draw(unknown_fields()) + varint(number << 3 | 4)
    return tag + bytes(8 if wire_type == 1 else 4)


def same(frame: ChunkFrame, chunk: push_pb2.GradientChunk) -> bool:
    return (
        frame.index == chunk.index
        and frame.part == chunk.part
        and frame.last == chunk.last
        and frame.encoding == chunk.encoding
        and frame.digest == chunk.digest
        and frame.presence == chunk.presence
        and frame.row_indices == chunk.row_indices
        and frame.data == chunk.data
    )


@checked
@given(gradient_chunks, st.lists(unknown_fields(), max_size=3), st.booleans())
def test_a_chunk_is_read_as_by_the_generated_code(
    chunk: push_pb2.GradientChunk, unknown: list[bytes], unknown_first: bool
) -> None:
    known, rest = chunk.SerializeToString(), b"".join(unknown)
    message = rest + known if unknown_first else known + rest

    assert same(frames.decode_chunk(memoryview(message)), chunk)


@checked
@given(
    header=st.builds(push_pb2.PushHeader, job_id=st.text(), sequence=st.integers(0, 9)),
    trailer=st.builds(push_pb2.PushTrailer, weight=st.floats(0, 9)),
    data=st.binary(max_size=99),
    chunk_first=st.booleans(),
)
def test_header_trailer_and_chunk_may_share_a_message(
    header: push_pb2.PushHeader,
    trailer: push_pb2.PushTrailer,
    data: bytes,
    chunk_first: bool,
) -> None:
    fields = frames.join_fields(
        (frames.REQUEST_HEADER_FIELD, header.SerializeToString()),
        (frames.REQUEST_TRAILER_FIELD, trailer.SerializeToString()),
    )
    chunk = frames.encode_chunk(
        frames.REQUEST_CHUNK_FIELD, index=1, presence=b"\1", data=data
    )
    message = chunk + fields if chunk_first else fields + chunk

    parsed = service_pb2.PushPullRequest.FromString(message)
    assert (parsed.header, parsed.trailer) == (header, trailer)
    assert parsed.chunk.data == data
    by_number = dict(frames.split_fields(message))
    assert push_pb2.PushHeader.FromString(bytes(by_number[1])) == header
    assert push_pb2.PushTrailer.FromString(bytes(by_number[2])) == trailer
    assert same(frames.decode_chunk(by_number[3]), parsed.chunk)


def outcome(read: Callable[[], Read]) -> Read | Refusal:
    """What reading gives; any exception but a refusal fails the test."""
    try:
        return read()
    except Refusal as refusal:
        return refusal


@st.composite
def hostile_bytes(draw: st.DrawFn) -> bytes:
    """A valid chunk that was cut, overwritten, added to or thinned out, or noise."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=60))
    unknown = b"".join(draw(st.lists(unknown_fields(), max_size=2)))
    message = bytearray(draw(gradient_chunks).SerializeToString() + unknown)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(message)))
        kind = draw(st.sampled_from(["cut", "overwrite", "insert", "delete"]))
        if kind == "cut":
            del message[position:]
        elif kind == "overwrite" and position < len(message):
            message[position] = draw(st.integers(0, 255))
        elif kind == "insert":
            message[position:position] = draw(st.binary(min_size=1, max_size=6))
        else:
            del message[position : position + draw(st.integers(1, 6))]
    return bytes(message)


@settings(checked, max_examples=1_500)
@given(hostile_bytes())
@example(b"\x4a\xff\xff\xff\xff\x07")  # 2 GiB of data announced, none there
@example(b"\x20" + b"\xff" * 10)  # a varint without an end
@example(b"\x00")  # field number 0
@example(b"\x53" * 64)  # groups without an end
@example(b"\x53" * 101)  # too many of them
@example(b"\x20\x01\x53\x00\x01\x54")  # field number 0 in a group
@example(b"\x54")  # an end without a group
@example(b"\x20\x01\x0f")  # wire type 7
@example(b"\x20\x01\x52\x81\x80\x80\x80\x80\x00")  # a length of six bytes
def test_hostile_chunks_are_refused_where_the_generated_code_does(
    message: bytes,
) -> None:
    chunk = None
    with contextlib.suppress(DecodeError):
        chunk = push_pb2.GradientChunk.FromString(message)

    read = outcome(lambda: frames.decode_chunk(memoryview(message)))

    if isinstance(read, Refusal):
        if read.reason is ErrorReason.LIMIT_EXCEEDED:
            assert len(message) > frames.CHUNK_FIELD_COUNT_MAX
            return
        assert read.reason is ErrorReason.MALFORMED_MESSAGE
        # Within an unknown group the generated code lets field number 0 pass, which
        # the format forbids.
        stricter = "field number 0" in read.message
        is_raw = chunk is not None and chunk.encoding == push_pb2.ENCODING_RAW
        is_known = chunk is not None and (
            chunk.encoding == push_pb2.ENCODING_SPARSE_ROWS
            or (is_raw and not chunk.row_indices)
        )
        assert stricter or not is_known
    else:
        assert chunk is not None
        assert same(read, chunk)


@checked
@given(hostile_bytes())
def test_hostile_messages_are_split_or_refused(message: bytes) -> None:
    read = outcome(lambda: frames.split_fields(message))

    if isinstance(read, Refusal):
        assert read.reason is ErrorReason.MALFORMED_MESSAGE
        assert "at byte" in read.message
    else:
        assert sum(len(value) for _, value in read) <= len(message)


@checked
@given(st.lists(st.booleans(), max_size=70))
def test_bits_come_back(bits: list[bool]) -> None:
    packed = frames.bits_to_bytes(bits)

    assert frames.bits_from_bytes(packed, len(bits)) == tuple(bits)
    assert packed == sum(bit << i for i, bit in enumerate(bits)).to_bytes(
        (len(bits) + 7) // 8, "little"
    )


@checked
@given(st.binary(max_size=6), st.integers(0, 40))
def test_hostile_bits_are_refused_unless_exactly_those(data: bytes, count: int) -> None:
    read = outcome(lambda: frames.bits_from_bytes(data, count))

    if isinstance(read, Refusal):
        assert read.reason is ErrorReason.MALFORMED_MESSAGE
        right_length = len(data) == (count + 7) // 8
        assert not right_length or int.from_bytes(data, "little") >> count
    else:
        assert frames.bits_to_bytes(read) == data
