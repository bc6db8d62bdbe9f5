"""Bytes become messages in one place, which refuses what would cost too much."""

import asyncio
import re
import threading
from pathlib import Path

import pytest
from google.protobuf.message import Message

import psserver
from psserver.edge import decoding
from psserver.edge.decoding import LARGE_BYTES_MIN, decode, decoded, parsed
from psserver.shard.rpc.push_codec import PushFields
from pswire.frames import CHUNK_FIELD_COUNT_MAX, MESSAGE_FIELD_COUNT_MAX
from pswire.limits import GROUP_COUNT_MAX
from pswire.membership_codec import RANGE_COUNT_MAX
from pswire.reasons import ErrorReason, Refusal
from pswire.schema_codec import PART_BYTES
from pswire.v1 import coordinator_service_pb2, push_pb2, schema_pb2
from pswire.v1 import parameter_service_pb2 as messages
from tests.refusals import refused

UNKNOWN = b"\xf2\x3f\x00"
EMPTY_ENTRIES = b"\x12" + b"\x82\x80\x40" + b"\x0a\x00" * ((1 << 20) // 2 + 1)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (messages.GetSessionRequest, UNKNOWN * 70_000),
        (messages.PullRequest, b"\xc2\x02\x90\x88\x07" + b"\x01" * 115_728),
        (coordinator_service_pb2.GetStatusRequest, b"\x53\x54" * 40_000),
        (coordinator_service_pb2.JoinRequest, b"\x1a\x00" * 600_000),
        (coordinator_service_pb2.JoinRequest, EMPTY_ENTRIES),
        (push_pb2.PushTrailer, b"\x12\x00" * 600_000),
    ],
    ids=["unknown", "a run", "groups", "optimizers", "tensors", "groups of a push"],
)
def test_too_many_fields_are_refused_unparsed(kind: type[Message], data: bytes) -> None:
    kind.FromString(data)  # it is well formed

    with refused(ErrorReason.LIMIT_EXCEEDED, "more than"):
        decode(kind, data)


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x0a\x05", b"\x0a\x01\xff"])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with refused(ErrorReason.MALFORMED_MESSAGE, "SeedHeader can't be parsed"):
        decode(messages.SeedHeader, data + b"\xff")


def test_the_longest_honest_messages_are_read() -> None:
    piece = push_pb2.DataRange(loader="loader", epoch=1, start=64, stop=128)
    leave = coordinator_service_pb2.LeaveRequest(consumed=[piece] * RANGE_COUNT_MAX)
    found = decode(type(leave), leave.SerializeToString())
    assert len(found.consumed) == RANGE_COUNT_MAX

    group = schema_pb2.GroupHyperparameters(values=[0.0] * 12)
    trailer = push_pb2.PushTrailer(groups=[group] * GROUP_COUNT_MAX)
    assert len(decode(type(trailer), trailer.SerializeToString()).groups) > 16_000

    entry = schema_pb2.SchemaEntry(
        model="m",
        name="0.weight",
        shape=[8, 8],
        element_type=schema_pb2.ELEMENT_TYPE_FLOAT32,
        kind=schema_pb2.ENTRY_KIND_PARAMETER,
        trainable=True,
    )
    count = PART_BYTES // (entry.ByteSize() + 2)
    part = coordinator_service_pb2.JoinRequest(
        schema=schema_pb2.ModelSchema(entries=[entry] * count)
    )
    assert len(decode(type(part), part.SerializeToString()).schema.entries) == count


async def test_a_large_message_is_parsed_by_a_thread() -> None:
    def where() -> str:
        return threading.current_thread().name

    assert await parsed(LARGE_BYTES_MIN - 1, where) == where()
    assert (await parsed(LARGE_BYTES_MIN, where)).startswith("large messages")


async def test_the_loop_goes_on_while_a_large_message_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_going = threading.Event()

    def check(*_: object, **__: object) -> None:
        assert is_going.wait(30)

    monkeypatch.setattr(decoding, "check_field_count", check)
    data = b"\x12" + b"\x80\x80\x04" + bytes(1 << 16)
    reading = asyncio.create_task(decoded(messages.GetSessionRequest, data))
    await asyncio.sleep(0)
    is_going.set()
    assert (await reading).job_id == "\0" * (1 << 16)


def test_a_push_is_split_within_limits() -> None:
    with refused(ErrorReason.LIMIT_EXCEEDED, "more than"):
        PushFields(b"\x1a\x00" * (MESSAGE_FIELD_COUNT_MAX + 1))


def test_a_chunk_of_many_fields_is_refused() -> None:
    chunk = b"\x20\x01" * (CHUNK_FIELD_COUNT_MAX + 1)
    fields = PushFields(b"\x1a" + b"\x82\x01" + chunk)
    with refused(ErrorReason.LIMIT_EXCEEDED, "a chunk has more than"):
        asyncio.run(fields.message())


def test_a_header_is_read_before_the_rest_is_looked_at() -> None:
    """Who may not push at all learns so whatever else it has sent."""
    header = push_pb2.PushHeader(job_id="job").SerializeToString()
    garbage = b"\x12\x01\xff" + b"\x1a\x01\xff" + b"\xc2\x02\x01\xff"
    fields = PushFields(b"\x0a" + bytes([len(header)]) + header + garbage)

    assert asyncio.run(fields.header()).job_id == "job"
    with pytest.raises(Refusal):
        asyncio.run(fields.message())


def test_nothing_else_of_the_server_parses() -> None:
    root = Path(psserver.__file__).parent
    parsing = re.compile(
        r"\b(FromString|ParseFromString|MergeFromString|DecodeError)\b"
    )
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if parsing.search(path.read_text())
    }
    assert found == {"edge/decoding.py"}
