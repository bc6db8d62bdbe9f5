"""Messages of gradients that change while they are copied."""

import itertools
import threading

import numpy as np
import pytest
import torch

from pswire.frames import (
    REQUEST_CHUNK_FIELD,
    ChunkFrame,
    decode_chunk,
    split_fields,
)
from psworker.steps.overlap.copier import ChunkCopies
from psworker.tensors.tensor_chunks import ChunkSource
from tests.doubles.placed_tensors import placement_of


def frame_of(message: bytes) -> ChunkFrame:
    ((number, view),) = split_fields(message)
    assert number == REQUEST_CHUNK_FIELD
    return decode_chunk(view)


def test_a_copy_is_the_message_that_the_step_would_make() -> None:
    tensors = [
        torch.tensor(3.0),
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(40.0)[::2],
        torch.arange(7.0).to(torch.bfloat16),
        torch.arange(9, dtype=torch.float64),
        torch.randn(700_000),
        torch.randn(5),
    ]
    placement = placement_of(tensors)
    copies = ChunkCopies()
    for absent in (set[int](), {0, 2, 6}):
        present = {i: each for i, each in enumerate(tensors) if i not in absent}
        source = ChunkSource([present.get(i) for i in range(len(tensors))])
        sent = 0
        for chunk in placement.chunks:
            if any(source.presence(chunk)):
                exact = source.encode(chunk, REQUEST_CHUNK_FIELD)
                assert copies.encode(chunk, present) == exact
                sent += 1
        assert sent >= 4


def test_a_gradient_of_another_type_goes_in_that_of_its_parameter() -> None:
    placement = placement_of([torch.zeros(3)])
    gradient = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    message = ChunkCopies().encode(placement.chunks[0], {0: gradient})

    values = np.frombuffer(frame_of(message).data, np.float32)
    assert values.tolist() == [1, 2, 3]


def test_a_chunk_never_has_the_digest_of_other_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The gradient changes between its copy and the digest, and again before it is sent.
    gradient = torch.zeros(1000)
    placement = placement_of([gradient])
    values = itertools.count(1)
    plain = np.copyto

    def copy_and_change(target: object, source: object) -> None:
        plain(target, source)  # type: ignore[arg-type]
        gradient.fill_(float(next(values)))

    monkeypatch.setattr(np, "copyto", copy_and_change)
    copies = ChunkCopies()

    for expected in range(3):
        frame = frame_of(copies.encode(placement.chunks[0], {0: gradient}))

        frame.verify()
        assert set(np.frombuffer(frame.data, np.float32)) == {float(expected)}


def test_a_chunk_that_changes_all_the_time_is_whole() -> None:
    gradient = torch.zeros(200_000)
    placement = placement_of([gradient])
    copies = ChunkCopies()
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            gradient.add_(1.0)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(50):
            for chunk in placement.chunks:
                frame_of(copies.encode(chunk, {0: gradient})).verify()
    finally:
        is_over.set()
        changing.join()
