"""Changes of values: who has what, what is sent again, and that both sides agree."""

import pytest
import torch

from psserver.shard.tensors.sent_values import SentValues, sent_bytes
from psserver.shard.tensors.values_encoder import ValuesEncoder
from pswire.compression import Compression
from pswire.encodings.known import ENCODINGS
from pswire.frames import (
    ENCODING_CHANGE,
    ENCODING_RAW,
    ENCODING_UNCHANGED,
    RESPONSE_CHUNK_FIELD,
    ChunkFrame,
    decode_chunk,
    split_fields,
)
from pswire.placement import Chunk, Placement, Slice
from pswire.schema import ElementType
from pswire.torch_types import buffer_of
from psworker.tensors.value_store import DeltaBase, ValueStore

CHUNK = Chunk(
    index=0,
    shard_index=0,
    element_type=ElementType.FLOAT32,
    vector_start=0,
    slices=(Slice(0, 0, 60), Slice(1, 0, 37), Slice(2, 0, 3)),
)
ALL = (True, True, True)


class Shard:
    """Values of one chunk, whose last slice is a buffer."""

    def __init__(self, method: str = "topk") -> None:
        compression = Compression(pull=method, ratio=0.1)
        self.encoder = ValuesEncoder(compression, [2])
        self.a, self.b = SentValues(), SentValues()
        self.generator = torch.Generator().manual_seed(3)
        self.values = torch.randn(100, generator=self.generator)

    def update(self) -> None:
        self.values += torch.randn(100, generator=self.generator) / 10

    def message(
        self,
        reader: SentValues | None,
        sequence: int | None,
        presence: tuple[bool, ...] = ALL,
    ) -> bytes:
        (message,), _ = self.encoder.encode(
            CHUNK,
            self.values,
            RESPONSE_CHUNK_FIELD,
            presence,
            reader=reader,
            sequence=sequence,
        )
        return message


class Worker:
    """Tensors of one chunk."""

    def __init__(self, method: str = "topk") -> None:
        self.tensors = [torch.zeros(60), torch.zeros(37), torch.zeros(3)]
        placement = Placement(shard_count=1, chunks=(CHUNK,))
        self.store = ValueStore(
            self.tensors,
            placement,
            buffers=[2],
            compression=Compression(pull=method),
        )

    @property
    def base(self) -> DeltaBase:
        return self.store.base

    def write(self, message: bytes) -> None:
        self.store.write(frame_of(message))

    @property
    def values(self) -> torch.Tensor:
        return torch.cat(self.tensors)


def frame_of(message: bytes) -> ChunkFrame:
    ((_, view),) = split_fields(message)
    return decode_chunk(view)


@pytest.mark.parametrize(
    "method", [name for name, each in ENCODINGS.items() if each.sends_changes]
)
def test_a_worker_follows_the_shard_within_what_was_left_out(method: str) -> None:
    shard, worker = Shard(method), Worker(method)
    worker.write(shard.message(shard.a, None))
    assert torch.equal(worker.values, shard.values)

    for sequence in range(1, 40):
        if sequence < 20:
            shard.update()
        frame = frame_of(shard.message(shard.a, sequence))
        assert frame.encoding == ENCODING_CHANGE
        worker.store.write(frame)
        known = shard.a.chunks.get(0)
        assert known is not None
        assert torch.equal(known[1].values, worker.values[:97])
        assert torch.equal(worker.values[97:], shard.values[97:])

    # What was left out comes later: after twenty messages without an update, all of it
    # where each sends a tenth of the elements.
    error = (worker.values - shard.values).abs().max()
    assert error <= {"topk": 0.0, "int8": 1e-6}.get(method, 0.3)
    assert not worker.base.is_lost


def test_a_message_that_is_asked_for_again_is_the_same_and_changes_nothing() -> None:
    shard, worker = Shard(), Worker()
    worker.write(shard.message(shard.a, None))
    shard.update()

    first = shard.message(shard.a, 1, (True, False, False))
    again = shard.message(shard.a, 1)
    worker.write(first)
    values = worker.values
    worker.write(again)

    assert first is again
    assert torch.equal(worker.values, values)
    assert not worker.base.is_lost


def test_buffers_are_the_newest_though_no_parameter_has_changed() -> None:
    """As in a chunk of buffers alone, of which a large model has many."""
    shard, worker = Shard(), Worker()
    worker.write(shard.message(shard.a, None))

    for sequence in range(1, 4):
        shard.values[97:] += 1
        worker.write(shard.message(shard.a, sequence))
        assert torch.equal(worker.values, shard.values)
    shard.values[97:] += 1
    worker.write(shard.message(shard.a, 3))  # the same push again

    assert torch.equal(worker.values, shard.values)


def test_newer_values_of_the_same_push_come_whole() -> None:
    """Of a message whose call broke nobody knows whether it has arrived."""
    shard, worker = Shard(), Worker()
    worker.write(shard.message(shard.a, None))
    shard.update()
    shard.message(shard.a, 1)
    shard.update()

    message = shard.message(shard.a, 1, (True, False, True))

    assert frame_of(message).encoding == ENCODING_RAW
    worker.write(message)
    assert torch.equal(worker.values, shard.values)
    shard.update()
    worker.write(shard.message(shard.a, 2))
    assert not worker.base.is_lost


def test_workers_that_have_the_same_share_messages_and_memory() -> None:
    shard = Shard()
    for worker in (shard.a, shard.b):
        shard.message(worker, None)
    for sequence in (1, 2, 3):
        shard.update()
        assert shard.message(shard.a, sequence) is shard.message(shard.b, sequence)
    shared = sent_bytes([shard.a, shard.b])
    assert shared < 2 * 97 * 4

    shard.update()
    shard.message(shard.a, None)

    assert sent_bytes([shard.a, shard.b]) == shared + 97 * 4
    assert sent_bytes([shard.a]) == 97 * 4


def test_who_is_no_member_gets_all_values() -> None:
    shard = Shard()
    for sequence in (None, 1, 2):
        message = shard.message(None, sequence)
        assert frame_of(message).encoding == ENCODING_RAW


def test_a_change_of_other_values_is_left_alone_and_said() -> None:
    shard, worker = Shard(), Worker()
    worker.write(shard.message(shard.a, None))
    shard.update()
    shard.message(shard.a, 1)  # never arrives
    shard.update()
    before = worker.values

    worker.write(shard.message(shard.a, 2))

    assert worker.base.is_lost
    assert torch.equal(worker.values, before)
    worker.write(shard.message(shard.a, None))
    assert torch.equal(worker.values, shard.values)


def test_a_change_fits_after_values_that_came_whole_after_a_change() -> None:
    shard, worker = Shard(), Worker()
    worker.write(shard.message(shard.a, None))
    for sequence in (1, 3):
        shard.update()
        worker.write(shard.message(shard.a, sequence))
        assert not worker.base.is_lost
        shard.update()
        worker.write(shard.message(shard.a, None))

    assert torch.equal(worker.values, shard.values)


def test_values_of_another_push_go_again_only_if_they_have_changed() -> None:
    encoder = ValuesEncoder(Compression(push="topk"), [2])
    a = SentValues()
    values = torch.randn(100)

    def encoding(
        sequence: int, *, with_buffer: bool = False, of: SentValues | None = a
    ) -> int:
        presence = (True, True, with_buffer)
        (message,), seen = encoder.encode(
            CHUNK, values, RESPONSE_CHUNK_FIELD, presence, of, sequence
        )
        assert torch.equal(seen(), values)
        return frame_of(message).encoding

    assert encoding(1) == ENCODING_RAW
    assert encoding(1) == ENCODING_RAW, "nobody knows whether the first has arrived"
    assert encoding(2) == ENCODING_UNCHANGED
    assert encoding(3, with_buffer=True) == ENCODING_RAW
    encoder.note_update(CHUNK.index)
    assert encoding(4) == ENCODING_RAW
    assert encoding(5) == ENCODING_UNCHANGED
    assert [encoding(5, of=None), encoding(6, of=None)] == [ENCODING_RAW] * 2
    assert encoding(7, of=SentValues()) == ENCODING_RAW


def test_who_has_rounded_values_already_has_them_rounded() -> None:
    encoder = ValuesEncoder(Compression(pull="bf16"), [])
    a = SentValues()
    values = torch.randn(100)
    first, second = (
        encoder.encode(CHUNK, values, RESPONSE_CHUNK_FIELD, (True,) * 3, a, sequence)
        for sequence in (1, 2)
    )
    (message,) = second[0]
    assert frame_of(message).encoding == ENCODING_UNCHANGED
    assert torch.equal(second[1](), first[1]())
    assert torch.equal(second[1](), values.bfloat16().float())


def test_who_seeded_has_what_it_seeded_and_may_have_edited_it_since() -> None:
    shard, worker = Shard(), Worker()
    parts = shard.values.split([60, 37, 3])
    for mine, theirs in zip(worker.tensors, parts, strict=True):
        mine.copy_(theirs)
    shard.encoder.note_exact(CHUNK, shard.values, shard.a)
    shard.update()
    worker.write(shard.message(shard.a, 1))
    assert not worker.base.is_lost

    worker.tensors[0].zero_()
    shard.update()
    worker.write(shard.message(shard.a, 2))

    known = shard.a.chunks.get(0)
    assert known is not None
    assert torch.equal(worker.values[:97], known[1].values)
    assert worker.base.byte_count == len(buffer_of(known[1].values))
