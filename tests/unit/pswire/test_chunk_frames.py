"""What frames promise beside their bytes, which `tests/property` holds."""

import pytest
import torch

from pswire import frames
from pswire.encodings.known import ENCODINGS
from pswire.limits import CHUNK_BYTES_MAX, MESSAGE_BYTES_MAX
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import parameter_service_pb2 as service_pb2
from pswire.v1 import push_pb2
from tests.refusals import refused


def chunk_of(message: bytes) -> frames.ChunkFrame:
    ((_, view),) = frames.split_fields(message)
    return frames.decode_chunk(view)


def encoded(data: bytes | memoryview, *, digest: int | None = None) -> bytes:
    return frames.encode_chunk(3, index=7, presence=b"\1", data=data, digest=digest)


@pytest.mark.parametrize(
    ("message_class", "field_name", "number"),
    [
        (service_pb2.PushPullRequest, "header", frames.REQUEST_HEADER_FIELD),
        (service_pb2.PushPullRequest, "trailer", frames.REQUEST_TRAILER_FIELD),
        (service_pb2.PushPullRequest, "chunk", frames.REQUEST_CHUNK_FIELD),
        (service_pb2.PushRequest, "header", frames.REQUEST_HEADER_FIELD),
        (service_pb2.PushRequest, "trailer", frames.REQUEST_TRAILER_FIELD),
        (service_pb2.PushRequest, "chunk", frames.REQUEST_CHUNK_FIELD),
        (service_pb2.SeedRequest, "header", frames.REQUEST_HEADER_FIELD),
        (service_pb2.SeedRequest, "chunk", frames.SEED_CHUNK_FIELD),
        (service_pb2.PushPullResponse, "chunk", frames.RESPONSE_CHUNK_FIELD),
        (service_pb2.PushPullResponse, "reply", frames.RESPONSE_REPLY_FIELD),
        (service_pb2.PushPullResponse, "waiting", frames.RESPONSE_WAITING_FIELD),
        (service_pb2.PullResponse, "chunk", frames.RESPONSE_CHUNK_FIELD),
        (service_pb2.PullResponse, "reply", frames.RESPONSE_REPLY_FIELD),
        (service_pb2.PullResponse, "waiting", frames.RESPONSE_WAITING_FIELD),
        (service_pb2.PullSnapshotResponse, "chunk", frames.RESPONSE_CHUNK_FIELD),
    ],
)
def test_field_numbers_are_those_of_the_protos(
    message_class: type[service_pb2.PushPullRequest], field_name: str, number: int
) -> None:
    assert message_class.DESCRIPTOR.fields_by_name[field_name].number == number


def test_encodings_are_those_of_the_proto() -> None:
    known = {
        "ENCODING_UNSPECIFIED": 0,
        "ENCODING_RAW": frames.ENCODING_RAW,
        "ENCODING_SPARSE_ROWS": frames.ENCODING_SPARSE_ROWS,
        **{f"ENCODING_{name.upper()}": each.number for name, each in ENCODINGS.items()},
        "ENCODING_CHANGE": frames.ENCODING_CHANGE,
        "ENCODING_UNCHANGED": frames.ENCODING_UNCHANGED,
        "ENCODING_SHARED_MEMORY": frames.ENCODING_SHARED_MEMORY,
    }
    assert dict(push_pb2.Encoding.items()) == known


def test_a_full_chunk_fits_a_message() -> None:
    assert len(encoded(bytes(CHUNK_BYTES_MAX))) < MESSAGE_BYTES_MAX


def test_reading_copies_nothing() -> None:
    message = encoded(b"payload")

    assert chunk_of(message).data.obj is message


def test_data_of_any_format_is_taken_as_bytes() -> None:
    values = torch.arange(6, dtype=torch.int32).reshape(2, 3).numpy()

    assert chunk_of(encoded(values.data)).data == values.tobytes()
    assert len(chunk_of(encoded(values[:0].data)).data) == 0


def test_an_intact_chunk_verifies() -> None:
    chunk_of(encoded(b"payload")).verify()
    chunk_of(encoded(b"")).verify()


def test_a_changed_chunk_is_refused_with_both_digests() -> None:
    message = bytearray(encoded(b"payload"))
    message[-1] ^= 1

    with pytest.raises(Refusal, match="the 7 bytes of chunk 7 have") as caught:
        chunk_of(bytes(message)).verify()
    assert caught.value.reason is ErrorReason.CHUNK_DIGEST_MISMATCH
    assert caught.value.facts == {"chunk_index": "7"}


def test_a_digest_that_the_caller_has_is_not_computed_again() -> None:
    assert chunk_of(encoded(b"payload", digest=5)).digest == 5


@pytest.mark.parametrize("encoding", [0, 3])
def test_an_encoding_of_another_release_is_refused(encoding: int) -> None:
    message = frames.encode_chunk(
        3, index=7, presence=b"\1", data=b"x", encoding=encoding
    )

    text = rf"encoding {encoding}, this release reads 1 \(raw\), 2 \(sparse rows\), 16"
    with pytest.raises(Refusal, match=text):
        chunk_of(message)


def test_the_digest_covers_the_row_indices() -> None:
    message = bytearray(
        frames.encode_chunk(
            3,
            index=7,
            presence=b"\1",
            data=b"payload",
            encoding=frames.ENCODING_SPARSE_ROWS,
            row_indices=b"row",
        )
    )
    chunk_of(bytes(message)).verify()
    message[message.index(b"row")] ^= 1

    with refused(ErrorReason.CHUNK_DIGEST_MISMATCH, "the 10 bytes of chunk 7 have"):
        chunk_of(bytes(message)).verify()


def test_a_raw_chunk_has_no_row_indices() -> None:
    message = frames.encode_chunk(
        3, index=7, presence=b"\1", data=b"x", row_indices=b"12345678"
    )

    with pytest.raises(Refusal, match="chunk 7 is raw and has 8 bytes of row indices"):
        chunk_of(message)


def test_rows_are_refused_where_values_are_meant() -> None:
    chunk_of(encoded(b"payload")).check_whole()
    message = frames.encode_chunk(
        3, index=7, presence=b"\1", data=b"x", encoding=frames.ENCODING_SPARSE_ROWS
    )

    with refused(ErrorReason.CHUNK_INVALID, "chunk 7 comes as sparse rows"):
        chunk_of(message).check_whole()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            b"\x1a\x05abc",
            "malformed message: field 3 is longer than the rest, at byte 0",
        ),
        (b"\x1a\x01a\x1a", "malformed message: a varint does not end, at byte 4"),
        (b"\x1a\x01a\x0d\x01", "malformed message: field 1 is cut off, at byte 3"),
        (b"\x02\x00", "malformed message: field number 0 is out of range, at byte 0"),
        (b"\x0b\x08\x01", "malformed message: group 1 has no end, at byte 3"),
        (b"\x0b\x14", "malformed message: group 2 ends without a beginning, at byte 1"),
        (b"\x0f", "malformed message: field 1 has the wire type 7, at byte 0"),
    ],
)
def test_broken_bytes_are_refused_by_what_and_where(message: bytes, text: str) -> None:
    with pytest.raises(Refusal) as caught:
        frames.split_fields(message)
    assert caught.value.reason is ErrorReason.MALFORMED_MESSAGE
    assert caught.value.message == text


def test_fields_that_are_no_messages_are_passed_over() -> None:
    message = b"\x08\x01" + b"\x1a\x01a" + b"\x25abcd"

    assert [(number, bytes(view)) for number, view in frames.split_fields(message)] == [
        (3, b"a")
    ]


def test_fields_in_another_order_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="ascending"):
        frames.join_fields((2, b"trailer"), (1, b"header"))


@pytest.mark.parametrize(
    ("data", "count", "text"),
    [
        (b"\1\0", 8, "got 2 bytes for 8 bits, expected 1"),
        (b"", 1, "got 0 bytes for 1 bits, expected 1"),
        (b"\x08", 3, "bits beyond the 3 that there are: last byte is 0x08"),
    ],
)
def test_wrong_bits_are_refused(data: bytes, count: int, text: str) -> None:
    with pytest.raises(Refusal) as caught:
        frames.bits_from_bytes(data, count)
    assert caught.value.reason is ErrorReason.MALFORMED_MESSAGE
    assert caught.value.message == text
