import dataclasses
import weakref
from collections.abc import Sequence

import pytest
import torch

from pswire.frames import (
    RESPONSE_CHUNK_FIELD,
    ChunkFrame,
    bits_from_bytes,
    decode_chunk,
    split_fields,
)
from pswire.placement import Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.slice_rows import unpack_rows
from pswire.torch_types import element_type_of, tensor_from_buffer
from psworker.tensors.tensor_chunks import ChunkSource
from psworker.tensors.value_store import Scope, ValueStore
from tests.doubles.placed_tensors import placement_of
from tests.refusals import refused


def awkward_tensors() -> list[torch.Tensor]:
    """0-dim, empty, with gaps, transposed, of several types, larger than a chunk."""
    return [
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(40.0)[::2],
        torch.arange(6, dtype=torch.float64).view(2, 3),
        torch.arange(5.0).bfloat16(),
        torch.arange(700_000.0),
        torch.arange(9000.0).view(90, 100).t(),
        torch.tensor([1, 2, 3]),
        torch.tensor([True, False]),
    ]


def frames_of(
    tensors: Sequence[torch.Tensor | None], placement: Placement
) -> list[ChunkFrame]:
    source = ChunkSource(tensors)
    messages = [
        source.encode(chunk, RESPONSE_CHUNK_FIELD)
        for chunk in placement.chunks
        if any(source.presence(chunk))
    ]
    return [decode_chunk(split_fields(message)[0][1]) for message in messages]


def test_what_was_gathered_is_scattered_to_the_same_values() -> None:
    tensors = awkward_tensors()
    placement = placement_of(tensors)
    frames = frames_of(tensors, placement)
    targets = [torch.zeros_like(each) for each in tensors]
    store = ValueStore(targets, placement)

    for frame in reversed(frames):
        store.write(frame)
    store.flush()

    assert not targets[2].is_contiguous()
    for target, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(target, tensor)


def test_elements_travel_in_c_order() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    (frame,) = frames_of([tensor], placement_of([tensor], 1))

    assert bytes(frame.data) == tensor.contiguous().numpy().tobytes()
    frame.verify()


def test_absent_tensors_take_no_bytes_and_are_left_alone() -> None:
    tensors = [torch.ones(3), torch.ones(4), torch.ones(5)]
    placement = placement_of(tensors, 1)
    targets = [torch.zeros_like(each) for each in tensors]

    (frame,) = frames_of([tensors[0], None, tensors[2]], placement)
    ValueStore(targets, placement).write(frame)

    assert bits_from_bytes(frame.presence, 3) == (True, False, True)
    assert len(frame.data) == 8 * 4
    assert [float(each.sum()) for each in targets] == [3.0, 0.0, 5.0]


def test_part_of_a_tensor_with_gaps_leaves_the_rest_of_it() -> None:
    tensor = torch.zeros(3000, 100).t()
    placement = placement_of([tensor])
    source = torch.ones(100, 3000)
    first = frames_of([source], placement)[0]
    store = ValueStore([tensor], placement)

    store.write(first)
    store.flush()

    count = len(first.data) // 4
    assert 0 < count < tensor.numel()
    assert tensor.reshape(-1)[:count].eq(1).all()
    assert tensor.reshape(-1)[count:].eq(0).all()


def test_parameters_keep_identity_and_their_gradient_graph_notices() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    placement = placement_of([parameter], 1)
    (frame,) = frames_of([torch.ones(4)], placement)
    version = parameter._version

    ValueStore([parameter], placement).write(frame)

    assert parameter.detach().eq(1).all()
    assert parameter.requires_grad
    assert parameter._version > version


def test_a_chunk_of_another_size_changes_nothing() -> None:
    tensors = [torch.zeros(8)]
    placement = placement_of(tensors, 1)
    (frame,) = frames_of([torch.ones(8)], placement)
    short = ChunkFrame(
        frame.index,
        0,
        True,
        1,
        frame.digest,
        frame.presence,
        frame.data,
        frame.data[4:],
    )

    with refused(ErrorReason.CHUNK_INVALID):
        ValueStore(tensors, placement).write(short)

    assert tensors[0].eq(0).all()


def test_bytes_that_changed_on_their_way_are_refused() -> None:
    tensors = [torch.zeros(8)]
    placement = placement_of(tensors, 1)
    (frame,) = frames_of([torch.ones(8)], placement)
    wrong = dataclasses.replace(frame, digest=1)

    with refused(ErrorReason.CHUNK_DIGEST_MISMATCH):
        ValueStore(tensors, placement).write(wrong)

    assert tensors[0].eq(0).all()


def test_a_chunk_that_is_none_is_refused() -> None:
    tensors = [torch.zeros(8)]
    placement = placement_of(tensors, 1)
    (frame,) = frames_of([torch.ones(8)], placement)
    other = dataclasses.replace(frame, index=7)

    with pytest.raises(Refusal, match="chunk 7 is none of the 1"):
        ValueStore(tensors, placement).write(other)


def test_a_copy_of_a_store_has_its_own_memory() -> None:
    tensors = [torch.zeros(3, 2).t(), torch.zeros(2)]
    store = ValueStore(tensors, placement_of(tensors, 1))

    shadow = store.copy()
    for tensor in shadow.tensors:
        tensor.fill_(5)

    assert all(each.eq(0).all() for each in tensors)
    store.take_from(shadow)
    assert all(each.eq(5).all() for each in tensors)


def test_gradients_of_a_wider_type_are_sent_in_the_type_of_the_parameter() -> None:
    parameter = torch.zeros(4, dtype=torch.bfloat16)
    placement = placement_of([parameter], 1)

    (frame,) = frames_of([torch.ones(4)], placement)

    assert len(frame.data) == 8


def test_bytes_are_shared_only_of_tensors_that_are_sent_as_they_are() -> None:
    narrow = [torch.zeros(3), torch.arange(5.0)]
    (chunk,) = placement_of(narrow).chunks
    wide = [each.double() for each in narrow]

    parts = ChunkSource([None, narrow[1]]).host_parts(chunk)
    assert parts is not None
    narrow[1][2] = 9.0

    assert [bytes(part) for part in parts] == [narrow[1].numpy().tobytes()]
    assert ChunkSource(wide).host_parts(chunk) is None


def test_values_of_a_tensor_with_gaps_take_memory_until_they_are_there() -> None:
    target = torch.zeros(300, 2).t()
    placement = placement_of([target])
    store = ValueStore([target], placement)
    (frame,) = frames_of([torch.ones(2, 300)], placement)

    store.write(frame)
    staged = weakref.ref(store._staged[0].flat)
    store.flush()

    assert torch.equal(target, torch.ones(2, 300))
    assert staged() is None


def test_buffers_that_are_local_are_not_written_and_the_others_noted() -> None:
    sent = [torch.full((3,), float(number)) for number in range(4)]
    placement = placement_of(sent, 1)
    held = [torch.full((3,), -1.0) for _ in sent]
    store = ValueStore(held, placement, buffers={1, 2, 3}, local={2})

    (frame,) = frames_of([sent[0], None, *sent[2:]], placement)
    store.write(frame)

    assert [each[0].item() for each in held] == [0, -1, -1, 3]
    assert store.written == {3}

    (alone,) = frames_of([None, None, sent[2], None], placement)
    store.write(alone)
    assert held[2][0].item() == -1


def test_a_copy_gives_back_only_buffers_that_were_written_into_it() -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    placement = placement_of(tensors, 1)
    store = ValueStore(tensors, placement, buffers={1, 2})
    copy = store.copy()
    (frame,) = frames_of([torch.ones(2), torch.ones(2), None], placement)
    copy.write(frame)
    tensors[1] += 5  # a forward pass meanwhile
    tensors[2] += 5

    store.take_from(copy)

    assert [each[0].item() for each in tensors] == [1, 1, 5]
    assert store.written == {1}


def test_another_tensor_may_take_the_place_of_one() -> None:
    tensors = [torch.zeros(2), torch.zeros(2)]
    placement = placement_of(tensors, 1)
    store = ValueStore(tensors, placement)
    (frame,) = frames_of([torch.ones(2), torch.ones(2)], placement)
    store.write(frame)
    other = torch.zeros(2)
    store.put(1, other)
    store.write(frame)
    assert other.tolist() == [1, 1]


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_answer_to_a_push_counts_up_only_what_it_changes(*, is_whole: bool) -> None:
    # Entry 0 is updated, 1 is of another optimizer, 2 and 3 are buffers.
    targets = [torch.ones(4, 4) for _ in range(4)]
    if not is_whole:
        targets = [torch.ones(4, 8)[:, ::2] for _ in range(4)]
    placement = placement_of(targets, 1)
    store = ValueStore(targets, placement, buffers={2, 3})
    store.narrow(Scope(updated=frozenset({0}), withheld=frozenset({3})))
    sent = [torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4), torch.zeros(4, 4)]
    versions = [target._version for target in targets]

    for frame in frames_of(list(sent), placement):
        store.write(frame)
    store.flush()

    counted = [
        target._version > version
        for target, version in zip(targets, versions, strict=True)
    ]
    assert counted == [True, False, False, False]
    assert torch.equal(targets[3], torch.ones(4, 4))
    assert (store.written, store.passed_over) == ({2}, {3})

    sent[1].fill_(2)
    for frame in frames_of(list(sent), placement):
        store.write(frame)
    store.narrow(None)
    store.flush()
    assert torch.equal(targets[1], sent[1])
    assert targets[1]._version > versions[1]

    for frame in frames_of(list(sent), placement):
        store.write(frame)
    store.flush()
    assert torch.equal(targets[3], sent[3])


@pytest.mark.parametrize(
    "change", ["other memory", "transposed", "with gaps", "shared with processes"]
)
def test_values_go_where_a_tensor_is_now(change: str) -> None:
    target = torch.zeros(3, 3)
    sent = torch.arange(9.0).view(3, 3)
    placement = placement_of([target], 1)
    store = ValueStore([target], placement)
    for frame in frames_of([torch.ones(3, 3)], placement):
        store.write(frame)
    before = target.data
    if change == "other memory":
        target.data = before.clone()
    elif change == "transposed":
        target.data = before.t()  # at the same address
    elif change == "with gaps":
        target.data = torch.zeros(3, 6)[:, ::2]
    else:
        target.share_memory_()

    for frame in frames_of([sent], placement):
        store.write(frame)
    store.flush()

    assert torch.equal(target, sent)


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("change", ["double", "half", "larger"])
def test_values_that_come_for_another_type_are_not_written(
    change: str, *, has_gaps: bool
) -> None:
    """The next step refuses it; until then nothing is read as what it is not."""
    target = torch.zeros(2, 6)[:, ::2] if has_gaps else torch.zeros(2, 3)
    placement = placement_of([target], 1)
    store = ValueStore([target], placement)
    other = {
        "double": torch.ones(2, 3).double(),
        "half": torch.ones(2, 3).half(),
        "larger": torch.ones(4, 6),
    }[change]
    target.data = other.clone()

    for frame in frames_of([torch.full((2, 3), 7.0)], placement):
        store.write(frame)
    store.flush()

    assert torch.equal(target, other)


def test_rows_travel_where_chunks_cut_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MIN", 64)
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MAX", 128)
    shapes = ((10, 7), (3,), (4, 2, 3))
    placement = placement_of([torch.zeros(shape) for shape in shapes])
    dense = [torch.arange(1.0, 71).view(10, 7), torch.ones(3), torch.ones(4, 2, 3)]
    rows = torch.tensor([1, 4, 5, 9])
    tensors = [
        torch.sparse_coo_tensor(
            rows[None], dense[0][rows], shapes[0], check_invariants=True
        ).coalesce(),
        dense[1],
        torch.sparse_coo_tensor(
            torch.zeros(1, 0), torch.zeros(0, 2, 3), shapes[2], check_invariants=True
        ).coalesce(),
    ]
    lengths = [7, 1, 6]

    found = [torch.zeros(shape) for shape in shapes]
    seen = []
    for frame in frames_of(tensors, placement):
        frame.verify()
        chunk = placement.chunks[frame.index]
        data = tensor_from_buffer(frame.data, chunk.element_type)
        presence = bits_from_bytes(frame.presence, len(chunk.slices))
        assert all(presence)
        slices = unpack_rows(frame.row_indices, chunk, presence, lengths)
        for piece, each in zip(chunk.slices, slices, strict=True):
            count = piece.element_count if each is None else each.element_count
            target = found[piece.entry_index].view(-1)[piece.start : piece.stop]
            where = slice(None) if each is None else torch.from_numpy(each.positions())
            target[where], data = data[:count], data[count:]
            seen.append((piece.entry_index, each is None))
        assert not data.numel()

    assert set(seen) == {(0, False), (1, True), (2, False)}
    expected = torch.zeros(shapes[0])
    expected[rows] = dense[0][rows]
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], dense[1])
    assert not found[2].any()


def test_rows_are_no_values() -> None:
    store = ValueStore([torch.zeros(4, 2)], placement_of([torch.zeros(4, 2)], 1))
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 2), (4, 2), check_invariants=True
    )
    (frame,) = frames_of([gradient.coalesce()], store.placement)

    with refused(ErrorReason.CHUNK_INVALID, "chunk 0 comes as sparse rows"):
        store.write(frame)
    assert not store.tensors[0].any()


def test_a_tensor_with_gaps_that_fills_chunks_alone_is_sent_in_order() -> None:
    tensor = torch.arange(600_000.0)[::2]
    placement = placement_of([tensor], shard_count=1)
    assert all(len(chunk.slices) == 1 for chunk in placement.chunks)

    frames = frames_of([tensor], placement)

    kind = element_type_of(torch.float32)
    values = torch.cat([tensor_from_buffer(each.data, kind) for each in frames])
    assert torch.equal(values, tensor)
