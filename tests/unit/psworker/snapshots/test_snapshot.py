import itertools
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from pswire.frames import (
    ENCODING_UNCHANGED,
    RESPONSE_CHUNK_FIELD,
    ChunkFrame,
    bits_to_bytes,
    decode_chunk,
    encode_chunk,
    split_fields,
)
from pswire.placement import place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, EntryKind, ModelSchema, SchemaEntry
from pswire.torch_types import TORCH_DTYPES, buffer_of
from psworker.errors import ClosedError, ConfigurationError
from psworker.snapshots.snapshot import Snapshot, SnapshotReader
from psworker.snapshots.snapshot_image import SnapshotImage
from tests.refusals import refused

SCHEMA = ModelSchema(
    (
        SchemaEntry(name="scale", shape=(), element_type=ElementType.FLOAT32),
        SchemaEntry(name="body", shape=(40, 100), element_type=ElementType.FLOAT32),
        SchemaEntry(name="empty", shape=(0, 3), element_type=ElementType.FLOAT32),
        SchemaEntry(name="half", shape=(7,), element_type=ElementType.BFLOAT16),
        SchemaEntry(
            name="steps",
            shape=(2,),
            element_type=ElementType.INT64,
            kind=EntryKind.BUFFER,
        ),
    )
)


def _values() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        (torch.randn(entry.shape) * 100).to(TORCH_DTYPES[entry.element_type])
        for entry in SCHEMA.entries
    ]


def _frames(
    shard_count: int, part_bytes: int = 1 << 20
) -> list[tuple[int, ChunkFrame]]:
    """All chunks of all shards as they would arrive, cut into parts."""
    values = [tensor.reshape(-1) for tensor in _values()]
    frames = []
    for chunk in place(SCHEMA, shard_count).chunks:
        payload = b"".join(
            bytes(buffer_of(values[piece.entry_index][piece.start : piece.stop]))
            for piece in chunk.slices
        )
        starts = range(0, len(payload), part_bytes)
        for part, start in enumerate(starts):
            message = encode_chunk(
                RESPONSE_CHUNK_FIELD,
                index=chunk.index,
                part=part,
                last=part == len(starts) - 1,
                presence=bits_to_bytes([True] * len(chunk.slices)),
                data=payload[start : start + part_bytes],
            )
            ((_, view),) = split_fields(message)
            frames.append((chunk.shard_index, decode_chunk(view)))
    return frames


@pytest.mark.parametrize("shard_count", [1, 2, 3])
@pytest.mark.parametrize("part_bytes", [64, 1 << 20])
def test_chunks_of_any_shards_and_parts_become_the_tensors(
    shard_count: int, part_bytes: int
) -> None:
    image = SnapshotImage(SCHEMA, shard_count)
    for shard_index, frame in _frames(shard_count, part_bytes):
        image.add(shard_index, frame)
    for shard_index in range(shard_count):
        image.check_complete(shard_index)
    for got, expected in zip(image.tensors(), _values(), strict=True):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert torch.equal(got, expected)
    assert image.received_byte_count == sum(
        entry.byte_count for entry in SCHEMA.entries
    )


def _changed(frame: ChunkFrame, **changes: object) -> ChunkFrame:
    fields = {name: getattr(frame, name) for name in ChunkFrame.__slots__}
    return ChunkFrame(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": 1}, ErrorReason.CHUNK_DIGEST_MISMATCH),
        ({"index": 999}, ErrorReason.CHUNK_INVALID),
        ({"presence": b"\x00"}, ErrorReason.CHUNK_INVALID),
    ],
)
def test_a_wrong_chunk_is_refused(
    changes: dict[str, object], reason: ErrorReason
) -> None:
    image = SnapshotImage(SCHEMA, 2)
    shard_index, frame = _frames(2)[0]
    with refused(reason):
        image.add(shard_index, _changed(frame, **changes))


def test_a_chunk_of_another_shard_and_one_that_comes_twice_are_refused() -> None:
    image = SnapshotImage(SCHEMA, 2)
    shard_index, frame = _frames(2)[0]
    with pytest.raises(Refusal, match="not one of its own"):
        image.add(1 - shard_index, frame)
    image.add(shard_index, frame)
    with pytest.raises(Refusal, match="came twice"):
        image.add(shard_index, frame)


def test_a_shard_that_ends_early_is_named() -> None:
    image = SnapshotImage(SCHEMA, 2)
    for shard_index, frame in _frames(2)[:-1]:
        image.add(shard_index, frame)
    last_shard = _frames(2)[-1][0]
    image.check_complete(1 - last_shard)
    with pytest.raises(Refusal, match=f"shard {last_shard} sent .* 1 of . chunks did"):
        image.check_complete(last_shard)


def test_a_chunk_cut_short_is_refused() -> None:
    image = SnapshotImage(SCHEMA, 1)
    shard_index, frame = _frames(1, 64)[0]
    with pytest.raises(Refusal, match="too short"):
        image.add(shard_index, _changed(frame, last=True))


def _unchanged(frame: ChunkFrame, digest: int) -> ChunkFrame:
    return _changed(
        frame, encoding=ENCODING_UNCHANGED, digest=digest, data=memoryview(b"")
    )


def _state() -> dict[str, dict[str, torch.Tensor]]:
    names = [entry.name for entry in SCHEMA.entries]
    return {SCHEMA.entries[0].model: dict(zip(names, _values(), strict=True))}


def test_an_interrupted_download_goes_on_with_the_chunks_that_lack() -> None:
    image = SnapshotImage(SCHEMA, 1)
    frames = [frame for _, frame in _frames(1, 64)]
    for frame in frames[:3]:  # a whole chunk or more, and a part of one
        image.add(0, frame)
    lacking = image.lacking(0)
    assert image.expect(lacking) == []
    for frame in frames:
        if frame.index in lacking:
            image.add(0, frame)
    image.check_complete(0)
    assert image.lacking(0) == []
    assert all(map(torch.equal, image.tensors(), _values()))


def test_what_is_held_is_kept_where_the_shard_has_the_same() -> None:
    image, state = SnapshotImage(SCHEMA, 2), _state()
    image.hold(state)
    for tensors in state.values():
        for tensor in tensors.values():
            tensor.zero_()  # it is no longer the image's
    for shard_index, frame in _frames(2):
        (digest,) = image.expect([frame.index])
        assert digest == frame.digest
        image.add(shard_index, _unchanged(frame, digest))
    assert image.received_byte_count == 0
    assert all(map(torch.equal, image.tensors(), _values()))


def test_tensors_of_another_shape_or_type_are_not_held() -> None:
    image, state = SnapshotImage(SCHEMA, 1), _state()
    (tensors,) = state.values()
    tensors["body"] = tensors["body"][:-1]
    tensors["half"] = tensors["half"].float()
    del tensors["steps"]
    image.hold(state)
    for shard_index, frame in _frames(1):
        image.add(shard_index, frame)
    image.check_complete(0)
    assert all(map(torch.equal, image.tensors(), _values()))


def test_a_chunk_is_unchanged_only_by_the_digest_of_what_is_held() -> None:
    shard_index, frame = _frames(2)[0]
    with refused(ErrorReason.CHUNK_INVALID):
        SnapshotImage(SCHEMA, 2).add(shard_index, _unchanged(frame, frame.digest))
    image = SnapshotImage(SCHEMA, 2)
    image.hold(_state())
    with refused(ErrorReason.CHUNK_DIGEST_MISMATCH):
        image.add(shard_index, _unchanged(frame, frame.digest + 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(3)


def _snapshot(**states: "OrderedDict[str, torch.Tensor]") -> Snapshot:
    return Snapshot(
        version=12,
        clock=4,
        generation=2,
        job_id="job-1",
        byte_count=100,
        _states=states,
    )


def test_a_saved_snapshot_loads_into_the_plain_model(tmp_path: Path) -> None:
    model = Tied()
    snapshot = _snapshot(model=OrderedDict(model.state_dict()))
    path = tmp_path / "model.safetensors"
    path.write_text("an older file")
    snapshot.save(path)
    other = Tied()
    other.load_state_dict(load_file(path), strict=True)
    assert torch.equal(other.outer.weight, model.inner.weight)
    assert list(tmp_path.iterdir()) == [path]
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    assert metadata["paramserver.version"] == "12"
    assert metadata["paramserver.clock"] == "4"
    assert metadata["paramserver.job"] == "job-1"


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        _snapshot(model=OrderedDict(weight=torch.eye(2))).save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_names_of_any_script_survive(tmp_path: Path) -> None:
    state = OrderedDict({"gewicht.ß/日本\n": torch.ones(2), "../x": torch.zeros(1)})
    _snapshot(model=state).save(tmp_path / "m")
    assert load_file(tmp_path / "m").keys() == state.keys()


def test_one_of_several_models_must_be_named(tmp_path: Path) -> None:
    snapshot = _snapshot(
        model=OrderedDict(a=torch.zeros(1)), model1=OrderedDict(b=torch.ones(1))
    )
    assert snapshot.models == ("model", "model1")
    assert list(snapshot.state_dict("model1")) == ["b"]
    for call in (snapshot.state_dict, lambda: snapshot.save(tmp_path / "m")):
        with pytest.raises(ConfigurationError, match="'model', 'model1'"):
            call()


def test_a_reader_without_an_address_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PS_COORDINATOR", raising=False)
    with pytest.raises(ConfigurationError, match="PS_COORDINATOR"):
        SnapshotReader()


def test_a_closed_reader_says_so_and_may_be_closed_again() -> None:
    reader = SnapshotReader("127.0.0.1:1")
    for _ in itertools.repeat(None, 2):
        reader.close()
    with pytest.raises(ClosedError):
        reader.latest()
