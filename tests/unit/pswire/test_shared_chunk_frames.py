"""Messages about chunks in shared memory are those of the generated code."""

import pytest

from pswire.frames import (
    ENCODING_SHARED_MEMORY,
    SHARED_CHUNKS_FIELD,
    decode_chunk,
    encode_shared_chunk,
    split_fields,
)
from pswire.reasons import Refusal
from pswire.shared_memory.segments import SharedRun
from pswire.v1 import parameter_service_pb2, push_pb2


@pytest.mark.parametrize("index", [0, 1, 300])
@pytest.mark.parametrize("presence", [b"", b"\x01", bytes(range(200))])
@pytest.mark.parametrize(
    ("digest", "shared"),
    [(0, SharedRun(0, 0)), (2**64 - 1, SharedRun(2**63, 1 << 20, 2**64 - 2))],
)
def test_the_bytes_are_those_of_the_generated_code(
    index: int, presence: bytes, digest: int, shared: SharedRun
) -> None:
    message = encode_shared_chunk(
        index=index, presence=presence, digest=digest, shared=shared
    )

    chunk = push_pb2.ParameterChunk(
        index=index,
        last=True,
        encoding=push_pb2.ENCODING_SHARED_MEMORY,
        digest=digest,
        presence=presence,
        shared_segment=shared.segment,
        shared_length=shared.length,
        shared_version=shared.version,
    )
    response = parameter_service_pb2.PushPullResponse(shared_chunks=[chunk])
    assert message == response.SerializeToString()
    ((field, view),) = split_fields(message)
    assert field == SHARED_CHUNKS_FIELD
    frame = decode_chunk(view)
    assert (frame.index, frame.presence, frame.digest) == (index, presence, digest)
    assert (frame.last, frame.part, frame.encoding) == (True, 0, ENCODING_SHARED_MEMORY)
    assert frame.shared == shared
    assert not frame.data


def test_joined_messages_are_one_with_all_chunks() -> None:
    messages = [
        encode_shared_chunk(
            index=index, presence=b"\x01", digest=index, shared=SharedRun(1, 2)
        )
        for index in range(3)
    ]

    views = split_fields(b"".join(messages))

    assert [decode_chunk(view).index for _, view in views] == [0, 1, 2]
    request = parameter_service_pb2.PushPullRequest.FromString(b"".join(messages))
    assert [chunk.index for chunk in request.shared_chunks] == [0, 1, 2]


def test_a_chunk_in_shared_memory_has_no_data_of_its_own() -> None:
    chunk = push_pb2.GradientChunk(
        index=3, encoding=push_pb2.ENCODING_SHARED_MEMORY, data=b"abcd"
    )

    with pytest.raises(
        Refusal, match="chunk 3 is in shared memory and has 4 bytes of data too"
    ):
        decode_chunk(memoryview(chunk.SerializeToString()))


def test_a_chunk_in_shared_memory_has_no_rows() -> None:
    chunk = push_pb2.GradientChunk(
        index=3, encoding=push_pb2.ENCODING_SHARED_MEMORY, row_indices=bytes(8)
    )

    with pytest.raises(Refusal, match="chunk 3 is shared memory and has 8 bytes of"):
        decode_chunk(memoryview(chunk.SerializeToString()))
