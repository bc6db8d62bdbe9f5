"""Gradients into shared memory, and values out of memory that goes on changing."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import xxhash

from psserver.shard.tensors.shard_vectors import ValuesSegment
from pswire.frames import (
    REQUEST_CHUNK_FIELD,
    ChunkFrame,
    decode_chunk,
    encode_chunk,
    encode_shared_chunk,
    split_fields,
)
from pswire.placement import Placement, place
from pswire.reasons import ErrorReason
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from pswire.shared_memory.segments import (
    GradientLayout,
    MemorySegment,
    SegmentKind,
    SharedRun,
    boot_id,
)
from pswire.torch_types import buffer_of
from psworker.tensors.tensor_chunks import ChunkSource
from psworker.tensors.value_store import CheckedChunk, ValueStore
from psworker.transport.shard_segments import ShardSegments
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not boot_id(), reason="Linux only")

SIZES = (1000, 500)
COUNT = sum(SIZES)


class Side:
    """A shard's memory, and a worker that has mapped it."""

    def __init__(self) -> None:
        self.placement: Placement = place(
            ModelSchema(
                tuple(
                    SchemaEntry(
                        name=f"p{size}", shape=(size,), element_type=ElementType.FLOAT32
                    )
                    for size in SIZES
                )
            ),
            1,
        )
        assert len(self.placement.chunks) == 1
        self.values = ValuesSegment(self.placement, 0)
        self.vector = self.values.vector(ElementType.FLOAT32, COUNT)
        layout = GradientLayout.of(self.placement, 0)
        self.gradient = MemorySegment.create(SegmentKind.GRADIENT, layout.byte_count)
        self.segments = ShardSegments(
            self.placement, 0, self.gradient, self.values.segment
        )
        self.tensors = [torch.zeros(size) for size in SIZES]
        self.store = ValueStore(self.tensors, self.placement)
        self.fetched: list[int] = []

    @contextmanager
    def updating(self) -> Iterator[torch.Tensor]:
        with self.values.updating(0):
            yield self.vector

    def told(self, presence: bytes = b"\x03") -> ChunkFrame:
        run = self.values.reference(0)
        return frame_of(
            encode_shared_chunk(index=0, presence=presence, digest=0, shared=run)
        )

    def fetch(self, index: int) -> list[ChunkFrame]:
        self.fetched.append(index)
        data = torch.full((COUNT,), 9.0)
        message = encode_chunk(1, index=0, presence=b"\x03", data=buffer_of(data))
        return [frame_of(message)]

    def write(self, frame: ChunkFrame) -> list[float]:
        self.segments.write(frame, self.store, self.fetch)
        assert all(each.unique().numel() == 1 for each in self.tensors)
        return [float(each[0]) for each in self.tensors]


def frame_of(message: bytes) -> ChunkFrame:
    ((_, view),) = split_fields(message)
    return decode_chunk(view)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Side:
    monkeypatch.setattr("pswire.shared_memory.segments.SHARED_BYTES_MIN", 0)
    return Side()


def test_values_are_read_as_they_were_told(side: Side) -> None:
    with side.updating() as vector:
        vector.fill_(3.0)

    assert side.write(side.told()) == [3.0, 3.0]
    assert not side.fetched


def test_of_slices_that_are_absent_nothing_is_written(side: Side) -> None:
    with side.updating() as vector:
        vector.fill_(3.0)

    assert side.write(side.told(presence=b"\x02")) == [0.0, 3.0]


def test_newer_values_are_as_good(side: Side) -> None:
    told = side.told()
    with side.updating() as vector:
        vector.fill_(4.0)

    assert side.write(told) == [4.0, 4.0]


@pytest.mark.parametrize("presence", [b"\x03", b"\x01"])
def test_values_that_are_being_changed_are_fetched(side: Side, presence: bytes) -> None:
    told = side.told(presence)

    with side.updating() as vector:
        vector[: COUNT // 2] = 5.0
        assert side.write(told) == [9.0, 9.0]

    assert side.fetched == [0]


def test_a_change_while_they_are_read_is_noticed(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ValueStore.write_checked
    changes = iter([6.0, 7.0])

    def overtaken(store: ValueStore, checked: CheckedChunk) -> None:
        write(store, checked)
        for value in changes:
            with side.updating() as vector:
                vector.fill_(value)
            break

    monkeypatch.setattr(ValueStore, "write_checked", overtaken)

    assert side.write(side.told()) == [7.0, 7.0]
    assert not side.fetched


@pytest.mark.parametrize(
    ("index", "segment", "length", "reason", "text"),
    [
        (1, 0, 4 * COUNT, ErrorReason.CHUNK_INVALID, "where it has not"),
        (0, 0, 4, ErrorReason.CHUNK_INVALID, "4 bytes in the shard's shared memory"),
        (0, 1, 4 * COUNT, ErrorReason.MALFORMED_MESSAGE, "which was not handed over"),
    ],
)
def test_a_message_about_other_memory_is_refused(
    side: Side, index: int, segment: int, length: int, reason: ErrorReason, text: str
) -> None:
    number = side.values.segment.header.number + segment
    message = encode_shared_chunk(
        index=index, presence=b"\x03", digest=0, shared=SharedRun(number, length)
    )

    with refused(reason, text):
        side.segments.write(frame_of(message), side.store, side.fetch)

    assert float(side.tensors[0][0]) == 0.0


@pytest.mark.parametrize("present", [(True, True), (True, False), (False, True)])
def test_a_gradient_is_written_where_the_message_says(
    side: Side, present: tuple[bool, bool]
) -> None:
    gradients = [
        torch.randn(size) if there else None
        for size, there in zip(SIZES, present, strict=True)
    ]

    message = side.segments.encode(ChunkSource(gradients), side.placement.chunks[0])

    assert message is not None
    frame = frame_of(message)
    assert frame.shared is not None
    assert frame.shared.segment == side.gradient.header.number
    expected = torch.cat([each for each in gradients if each is not None])
    layout = GradientLayout.of(side.placement, 0)
    written = side.gradient.data[layout.run(0, frame.shared.length)]
    assert bytes(written) == bytes(buffer_of(expected))
    assert frame.digest == xxhash.xxh3_64_intdigest(buffer_of(expected))
    assert frame.presence == bytes([present[0] + 2 * present[1]])


def test_sparse_gradients_go_in_messages(side: Side) -> None:
    sparse = torch.zeros(SIZES[0]).to_sparse()

    source = ChunkSource([sparse, None])

    assert side.segments.encode(source, side.placement.chunks[0]) is None


def test_small_chunks_go_in_messages(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pswire.shared_memory.segments.SHARED_BYTES_MIN", 4 * COUNT + 1)
    source = ChunkSource([torch.ones(size) for size in SIZES])

    assert side.segments.encode(source, side.placement.chunks[0]) is None


def test_what_is_in_shared_memory_can_be_sent_in_a_message(side: Side) -> None:
    gradients = [torch.full((SIZES[0],), 3.0), None]
    source, chunk = ChunkSource(gradients), side.placement.chunks[0]
    message = side.segments.encode(source, chunk)
    assert message is not None

    whole = side.segments.in_message(message)

    assert whole == source.encode(chunk, REQUEST_CHUNK_FIELD)
    frame_of(whole).verify()
