"""Compressed chunks of pushes: what is staged of them, and what is refused."""

from typing import Any

import pytest
import torch

from psserver.shard.core.effects import StagedContribution
from psserver.shard.host.chunk_updates import byte_count, with_bytes
from psserver.shard.tensors.compressed_gradients import CompressedGradients
from pswire.encodings.known import ENCODINGS, Encoding
from pswire.placement import Chunk, Slice
from pswire.reasons import ErrorReason
from pswire.schema import ElementType
from tests.refusals import refused

PARAMETERS = (Slice(0, 0, 6), Slice(1, 0, 4))
BUFFER = Slice(2, 0, 3)


def chunk_of(*slices: Slice, element_type: ElementType = ElementType.FLOAT32) -> Chunk:
    return Chunk(
        index=7,
        shard_index=0,
        element_type=element_type,
        vector_start=0,
        slices=slices,
    )


@pytest.mark.parametrize(
    "element_type", [ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.FLOAT16]
)
def test_what_is_staged_is_decoded_to_float32_with_buffers_as_they_came(
    element_type: ElementType,
) -> None:
    chunk = chunk_of(*PARAMETERS, BUFFER, element_type=element_type)
    dtype = {2: torch.float16, 4: torch.float32}[element_type.byte_count]
    if element_type is ElementType.BFLOAT16:
        dtype = torch.bfloat16
    buffers = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    codec = ENCODINGS["int8"].codec()
    gradient = torch.linspace(-1, 1, 10)
    data = bytes(buffers.view(torch.uint8).numpy()) + codec.encode(gradient)
    presence = (True, True, True)

    payload = CompressedGradients(ENCODINGS["int8"], [2]).payload(
        chunk, presence, ENCODINGS["int8"].number, memoryview(data)
    )
    part: Any = StagedContribution(
        worker_id="a", weight=1.0, loss_scale=1.0, presence=presence, payload=payload
    )
    (contribution,) = with_bytes([part])

    assert payload.byte_count == len(data)
    assert byte_count([part]) == chunk.byte_count
    elements = contribution.elements(chunk)
    assert elements.dtype is torch.float32
    sent = codec.decode(memoryview(codec.encode(gradient)), 10)
    assert torch.equal(elements, torch.cat((sent, buffers.float())))


INT8 = ENCODINGS["int8"].codec().encode(torch.ones(10))


@pytest.mark.parametrize(
    ("method", "chunk", "data", "encoding", "text"),
    [
        (
            None,
            chunk_of(*PARAMETERS),
            INT8,
            ENCODINGS["int8"].number,
            "chunk 7 comes in encoding 18, and gradients of this job go as they are",
        ),
        (
            ENCODINGS["int8"],
            chunk_of(*PARAMETERS),
            INT8,
            ENCODINGS["topk"].number,
            "chunk 7 comes in encoding 19, and gradients of this job go as int8",
        ),
        (
            ENCODINGS["int8"],
            chunk_of(*PARAMETERS, element_type=ElementType.FLOAT64),
            INT8,
            ENCODINGS["int8"].number,
            "chunk 7 comes as int8, and its elements of float64 go as they are",
        ),
        (
            ENCODINGS["int8"],
            chunk_of(BUFFER, *PARAMETERS),
            INT8,
            ENCODINGS["int8"].number,
            "chunk 7 comes as int8, and has a buffer before a parameter",
        ),
        (
            ENCODINGS["int8"],
            chunk_of(*PARAMETERS, BUFFER),
            b"12345678901",
            ENCODINGS["int8"].number,
            "chunk 7 has 11 bytes, and its buffers alone take 12",
        ),
        (
            ENCODINGS["int8"],
            chunk_of(*PARAMETERS),
            INT8[1:],
            ENCODINGS["int8"].number,
            "elements encoded as int8: 10 of them take 14 bytes, 13 came",
        ),
    ],
)
def test_what_the_job_has_not_agreed_on_is_refused(
    method: Encoding | None, chunk: Chunk, data: bytes, encoding: int, text: str
) -> None:
    presence = (True,) * len(chunk.slices)
    with refused(ErrorReason.CHUNK_INVALID, text):
        CompressedGradients(method, [2]).payload(
            chunk, presence, encoding, memoryview(data)
        )
