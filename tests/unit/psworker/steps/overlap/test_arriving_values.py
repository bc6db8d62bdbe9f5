"""Which values are there, and what becomes of those that come too late."""

import pytest
import torch

from pswire.frames import RESPONSE_CHUNK_FIELD, decode_chunk, split_fields
from pswire.placement import place
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from psworker.steps.overlap.arriving_values import ArrivingValues
from psworker.tensors.tensor_chunks import ChunkSource

SCHEMA = ModelSchema(
    (
        SchemaEntry(name="a", shape=(4,), element_type=ElementType.FLOAT32),
        SchemaEntry(name="b", shape=(4,), element_type=ElementType.FLOAT64),
        SchemaEntry(name="frozen", shape=(4,), element_type=ElementType.FLOAT16),
    )
)


class Arrival:
    """Three tensors, a chunk for each; the third is updated by no optimizer."""

    def __init__(self) -> None:
        dtypes = (torch.float32, torch.float64, torch.float16)
        self.tensors = [torch.zeros(4, dtype=each) for each in dtypes]
        for tensor in self.tensors[:2]:
            tensor.requires_grad_(True)
        self.placement = place(SCHEMA, 1)
        self.values = ArrivingValues(self.tensors, self.placement, {0, 1})

    def come(self, entry: int, value: float) -> None:
        source = ChunkSource([torch.full_like(t, value) for t in self.tensors])
        message = source.encode(self.placement.chunks[entry], RESPONSE_CHUNK_FIELD)
        ((_, view),) = split_fields(message)
        self.values.write(decode_chunk(view))


def test_a_step_lacks_what_optimizers_update_until_it_comes() -> None:
    arrival = Arrival()
    assert arrival.values.are_there([0, 1, 2])

    arrival.values.open()
    assert arrival.values.are_there([2])
    assert not arrival.values.are_there([0])
    arrival.come(0, 1.0)

    assert arrival.values.are_there([0, 2])
    assert not arrival.values.are_there([0, 1])


def test_the_same_bytes_again_are_no_mix() -> None:
    arrival = Arrival()
    arrival.values.open()
    arrival.come(0, 1.0)
    arrival.values.note_read([0])
    version = arrival.tensors[0]._version

    arrival.come(0, 1.0)

    assert not arrival.values.is_mixed
    assert arrival.tensors[0]._version == version


def test_other_values_for_what_was_read_are_a_mix_that_autograd_does_not_meet() -> None:
    arrival = Arrival()
    arrival.values.open()
    arrival.come(0, 1.0)
    arrival.values.note_read([0])
    loss = arrival.tensors[0].square().sum()

    arrival.come(0, 3.0)

    assert arrival.values.is_mixed
    assert arrival.tensors[0].tolist() == [3.0] * 4
    loss.backward()  # of both versions: whoever sees the mix throws it away


def test_values_that_nobody_has_read_are_a_change_that_autograd_meets() -> None:
    arrival = Arrival()
    arrival.values.open()
    loss = arrival.tensors[0].square().sum()

    arrival.come(0, 3.0)

    assert not arrival.values.is_mixed
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
