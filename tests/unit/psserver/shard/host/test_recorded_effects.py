"""What a recording says of updates comes back as it was, in every field."""

import json
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import torch

from psserver.shard.core.effects import ApplyChunk, BufferAverage, StagedContribution
from psserver.shard.host.recorded_effects import (
    dump_tensors,
    dump_update,
    load_tensors,
    load_update,
)
from psserver.shard.tensors.compressed_gradients import CompressedPayload
from psserver.shard.tensors.contribution import SparsePayload
from pswire.aggregation import Aggregation
from pswire.encodings.known import ENCODINGS
from pswire.job_settings import JobSettings
from pswire.job_terms_codec import dump_settings, load_settings
from pswire.membership import LabelledEnum
from pswire.placement import Chunk, Slice
from pswire.schema import ElementType
from pswire.slice_rows import SliceRows
from tests.doubles.core_values import key

PIECES = (Slice(0, 0, 6), Slice(1, 0, 3), Slice(2, 4, 8))
CHUNK = Chunk(
    index=7,
    shard_index=0,
    vector_start=0,
    element_type=ElementType.FLOAT32,
    slices=PIECES,
)
ROW_LENGTHS = (2, 3, 2)


def part(payload: object, name: str = "a") -> StagedContribution:
    return StagedContribution(
        worker_id=name,
        weight=0.1,
        presence=(True, False, True),
        payload=payload,
        loss_scale=1024.0,
        factor=1 / 3,
        value_entries=frozenset({2}),
        is_source=True,
    )


def update(*parts: StagedContribution) -> ApplyChunk:
    return ApplyChunk(
        clock=9,
        chunk_index=7,
        optimizer='a"/é',
        contributions=parts,
        total_weight=0.30000000000000004,
        hyperparameters=((1e-3, float("inf")), (5e-324,)),
        spec_digest="d",
        pusher=key("a/2"),
        staleness=3,
        average=BufferAverage(frozenset({2, 1}), 4),
        gradient_scale=0.1,
    )


def round_trip(effect: ApplyChunk) -> ApplyChunk:
    line, pieces = dump_update(effect)
    data = memoryview(b"".join(bytes(each) for each in pieces) + b"rest")
    read, rest = load_update(line, data, CHUNK, ROW_LENGTHS, {2})
    assert bytes(rest) == b"rest"
    return read


def test_every_field_of_an_update_comes_back() -> None:
    raw = memoryview(b"0123" * 10)
    int8 = ENCODINGS["int8"]
    values = int8.codec().encode(torch.linspace(-1, 1, 6))
    encoded = CompressedPayload(
        data=memoryview(b"0123" * 4 + bytes(values)),
        encoding=int8,
        parameter_count=6,
        buffer_bytes=16,
        element_type=ElementType.FLOAT32,
        chunk_bytes=52,
    )
    effect = update(part(raw), part(encoded, "b"))

    assert round_trip(effect) == effect
    dumped: tuple[ApplyChunk | StagedContribution, ...] = (
        effect,
        *effect.contributions,
    )
    for changed in dumped:
        for each in fields(changed):
            # Else the comparison above says nothing of it.
            assert getattr(changed, each.name) != each.default


def test_rows_come_back() -> None:
    rows = SliceRows(PIECES[0], 2, np.array([0, 2], np.int64))
    payload = SparsePayload(memoryview(b"x" * 32), (rows, None, None), 52)

    (read,) = round_trip(update(part(payload))).contributions

    assert isinstance(read.payload, SparsePayload)
    assert (read.payload.data, read.payload.chunk_bytes) == (payload.data, 52)
    first, *others = read.payload.rows
    assert first is not None
    assert first.rows.tolist() == [0, 2]
    assert others == [None, None]


def test_tensors_come_back() -> None:
    tensors = {
        "number": torch.tensor(3.0),
        "none": torch.empty(0),
        "half": torch.arange(6).bfloat16().reshape(2, 3),
        "bits": torch.tensor([True, False]),
    }
    rows, pieces = dump_tensors(tensors)

    read = load_tensors(rows, memoryview(b"".join(map(bytes, pieces))))

    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def other(default: object) -> object:
    """A value of this type that is not the default."""
    if isinstance(default, LabelledEnum):
        return next(each for each in type(default) if each is not default)
    if isinstance(default, Aggregation):
        return Aggregation.parse("krum:f=2")
    if isinstance(default, bool):
        return not default
    return "job" if default is MISSING else default + 0.5  # type: ignore[operator]


def test_every_setting_of_a_job_comes_back() -> None:
    changed: dict[str, Any] = {
        each.name: other(each.default) for each in fields(JobSettings)
    }
    settings = JobSettings(**changed)

    text = json.dumps(dump_settings(settings))

    assert load_settings(json.loads(text)) == settings
