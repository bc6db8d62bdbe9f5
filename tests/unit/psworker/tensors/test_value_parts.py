"""Values of a chunk that come in several messages."""

from dataclasses import replace
from itertools import compress

import pytest
import torch

from pswire.compression import Compression
from pswire.frames import (
    RESPONSE_CHUNK_FIELD,
    ChunkFrame,
    bits_to_bytes,
    decode_chunk,
    encode_parts,
    split_fields,
)
from pswire.limits import CHUNK_BYTES_MAX, VALUES_PART_BYTES
from pswire.placement import Placement, Slice, place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from pswire.torch_types import buffer_of
from psworker.steps.overlap.arriving_values import ArrivingValues
from psworker.tensors.value_store import ValueStore, pieces_between
from tests.refusals import refused

SIZES = (100_000, 7, 650_000, 150_000)
"""Elements of float32: a chunk of 3.4 MiB, whose parts end within tensors."""

ALL = (True,) * len(SIZES)


def placed(element_type: ElementType = ElementType.FLOAT32) -> Placement:
    schema = ModelSchema(
        tuple(
            SchemaEntry(name=f"p{index}", shape=(size,), element_type=element_type)
            for index, size in enumerate(SIZES)
        )
    )
    return place(schema, 1, CHUNK_BYTES_MAX)


def values() -> list[torch.Tensor]:
    return [torch.arange(float(size)) + index for index, size in enumerate(SIZES)]


def parts_of(presence: tuple[bool, ...] = ALL) -> list[ChunkFrame]:
    data = torch.cat(list(compress(values(), presence)))
    frames = []
    for message in encode_parts(
        RESPONSE_CHUNK_FIELD,
        index=0,
        presence=bits_to_bytes(presence),
        data=buffer_of(data),
    ):
        ((_, view),) = split_fields(message)
        frames.append(decode_chunk(view))
    return frames


@pytest.mark.parametrize(
    ("presence", "count"),
    [(ALL, 3), ((True, False, True, True), 3), ((False, *ALL[1:]), 3)],
)
def test_parts_in_any_order_are_the_values(
    presence: tuple[bool, ...], count: int
) -> None:
    placement = placed()
    assert len(placement.chunks) == 1
    targets = [torch.zeros(size) for size in SIZES]
    store = ValueStore(targets, placement)
    frames = parts_of(presence)

    for frame in reversed(frames):
        store.write(frame)

    assert len(frames) == count
    for target, value, is_present in zip(targets, values(), presence, strict=True):
        assert torch.equal(target, value if is_present else torch.zeros_like(value))


@pytest.mark.parametrize(
    ("position", "changes", "text"),
    [
        (0, {"part": 1}, "for"),
        (0, {"last": True}, "has 1572864 bytes for 900007 elements"),
        (1, {"last": True}, "for"),
        (2, {"last": False}, "others behind it"),
        (2, {"part": 3}, "lies beyond its 900007"),
        (2, {"part": 1 << 31}, "lies beyond"),
        (1, {"digest": 1}, "digest"),
    ],
)
def test_a_part_of_another_size_than_its_place_has_changes_nothing(
    position: int, changes: dict[str, int], text: str
) -> None:
    targets = [torch.zeros(size) for size in SIZES]
    store = ValueStore(targets, placed())
    wrong = replace(parts_of()[position], **changes)  # type: ignore[arg-type]
    if (position, changes) == (0, {"part": 1}):
        wrong = replace(wrong, data=wrong.data[:-4])

    with pytest.raises(Refusal, match=text):
        store.write(wrong)

    assert not any(target.any() for target in targets)


def test_in_a_job_that_pulls_changes_parts_are_refused() -> None:
    targets = [torch.zeros(size) for size in SIZES]
    store = ValueStore(targets, placed(), compression=Compression(pull="int8"))

    with refused(ErrorReason.CHUNK_INVALID, "each chunk comes whole"):
        store.write(parts_of()[0])

    assert not any(target.any() for target in targets)


def test_a_chunk_is_there_with_its_last_part() -> None:
    targets = [torch.zeros(size) for size in SIZES]
    arriving = ArrivingValues(targets, placed(), range(len(SIZES)))
    arriving.open()
    first, second, last = parts_of()

    arriving.write(first)
    arriving.write(second)
    assert not arriving.are_there([0])
    arriving.write(last)
    assert arriving.are_there([0])

    arriving.note_read([0])
    arriving.write(first)
    assert not arriving.is_mixed
    arriving.write(second)
    assert not arriving.is_mixed


def test_what_lies_in_a_range_of_several_slices() -> None:
    pieces = [Slice(3, 10, 14), Slice(4, 0, 2), Slice(6, 5, 8)]

    assert pieces_between(pieces, 0, 9) == pieces
    assert pieces_between(pieces, 0, 4) == pieces[:1]
    assert pieces_between(pieces, 3, 7) == [
        Slice(3, 13, 14),
        *pieces[1:2],
        Slice(6, 5, 6),
    ]
    assert pieces_between(pieces, 4, 6) == pieces[1:2]
    assert pieces_between(pieces, 9, 12) == []


@pytest.mark.parametrize(
    ("byte_count", "sizes"),
    [
        (0, [0]),
        (1, [1]),
        (VALUES_PART_BYTES, [VALUES_PART_BYTES]),
        (2 * VALUES_PART_BYTES + 4, [VALUES_PART_BYTES, VALUES_PART_BYTES, 4]),
    ],
)
def test_all_parts_but_the_last_have_one_size(
    byte_count: int, sizes: list[int]
) -> None:
    data = torch.arange(byte_count, dtype=torch.uint8)
    frames = []
    for message in encode_parts(1, index=5, presence=b"\1", data=buffer_of(data)):
        ((_, view),) = split_fields(message)
        frames.append(decode_chunk(view))

    assert [len(frame.data) for frame in frames] == sizes
    assert [frame.part for frame in frames] == list(range(len(sizes)))
    assert [frame.last for frame in frames] == [False] * (len(sizes) - 1) + [True]
    assert b"".join(frame.data for frame in frames) == bytes(buffer_of(data))
    for frame in frames:
        frame.verify()
