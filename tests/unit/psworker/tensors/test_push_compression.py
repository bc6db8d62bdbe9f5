"""Residuals: when they change, and in which units they are."""

import logging

import pytest
import torch

from pswire.compression import Compression
from pswire.encodings.known import BY_NUMBER
from pswire.placement import Chunk, Slice
from pswire.schema import ElementType, EntryKind, ModelSchema, SchemaEntry
from psworker.tensors.push_compression import PushCompression, PushEncoder

SCHEMA = ModelSchema(
    (
        SchemaEntry(name="a", shape=(2, 10), element_type=ElementType.FLOAT32),
        SchemaEntry(
            name="b",
            shape=(3,),
            element_type=ElementType.FLOAT32,
            kind=EntryKind.BUFFER,
        ),
    )
)
CHUNK = Chunk(
    index=0,
    shard_index=0,
    element_type=ElementType.FLOAT32,
    vector_start=0,
    slices=(Slice(0, 5, 15), Slice(1, 0, 3)),
)
GRADIENT = torch.tensor([5.0, -4, 3, 2, 1, 1, 1, 1, 1, -6])
BUFFERS = torch.tensor([1.0, 2.0, 3.0])


def encoder_of(
    compression: PushCompression, sequence: int = 1, loss_scale: float = 1.0
) -> PushEncoder:
    made = compression.encoder("optimizer", f"w0 {sequence}", loss_scale=loss_scale)
    assert made is not None
    return made


def sent_by(encoder: PushEncoder, gradient: torch.Tensor) -> torch.Tensor:
    """What a shard gets of a gradient, with buffers that go as they are."""
    fewer = encoder.encode(CHUNK, (True, True), torch.cat((gradient, BUFFERS)))
    assert fewer is not None
    number, data = fewer
    assert data[:12] == bytes(BUFFERS.view(torch.uint8).numpy())
    return BY_NUMBER[number].codec().decode(memoryview(data)[12:], 10)


def residual_of(compression: PushCompression) -> torch.Tensor:
    residual = compression.residuals_of("optimizer")[0]
    assert torch.equal(residual[:5], torch.zeros(5))
    assert torch.equal(residual[15:], torch.zeros(5))
    return residual[5:15]


@pytest.fixture
def compression() -> PushCompression:
    return PushCompression(Compression(push="topk", ratio=0.2), SCHEMA)


def test_what_is_left_out_is_added_to_the_next_gradient(
    compression: PushCompression,
) -> None:
    encoder = encoder_of(compression)
    assert sent_by(encoder, GRADIENT).tolist() == [5, 0, 0, 0, 0, 0, 0, 0, 0, -6]
    encoder.settle(is_counted=True)
    assert residual_of(compression).tolist() == [0, -4, 3, 2, 1, 1, 1, 1, 1, 0]

    sent = sent_by(encoder_of(compression, 2), torch.zeros(10))

    assert sent.tolist() == [0, -4, 3, 0, 0, 0, 0, 0, 0, 0]
    assert compression.byte_count == 40


def test_a_push_that_does_not_count_leaves_the_residual_as_it_was(
    compression: PushCompression,
) -> None:
    first = encoder_of(compression)
    sent_by(first, GRADIENT)
    first.settle(is_counted=True)
    before = residual_of(compression)

    for sequence in (2, 3):
        thrown_away = encoder_of(compression, sequence)
        sent_by(thrown_away, GRADIENT * 100)
        assert torch.equal(residual_of(compression), before)
        thrown_away.settle(is_counted=False)

    assert torch.equal(residual_of(compression), before)


def test_a_chunk_that_is_built_again_counts_once(compression: PushCompression) -> None:
    encoder = encoder_of(compression)
    sent_by(encoder, GRADIENT * 7)
    sent_by(encoder, GRADIENT)
    encoder.settle(is_counted=True)
    encoder.settle(is_counted=True)

    assert residual_of(compression).tolist() == [0, -4, 3, 2, 1, 1, 1, 1, 1, 0]


def test_a_residual_carries_no_loss_scale(compression: PushCompression) -> None:
    scaled = encoder_of(compression, loss_scale=1024.0)
    sent_by(scaled, GRADIENT * 1024)
    scaled.settle(is_counted=True)
    assert residual_of(compression).tolist() == [0, -4, 3, 2, 1, 1, 1, 1, 1, 0]

    sent = sent_by(encoder_of(compression, 2, loss_scale=2.0), torch.zeros(10))

    assert sent.tolist() == [0, -8, 6, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("push", ["topk", "onebit"])
@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
def test_a_residual_that_no_shard_takes_is_thrown_away(
    push: str, loss_scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    compression = PushCompression(Compression(push=push, ratio=0.2), SCHEMA)
    alone = PushCompression(Compression(push=push, ratio=0.2), SCHEMA)
    gradient = GRADIENT * 9e16 * loss_scale  # its norm is 8.8e17, without the scale
    first = encoder_of(alone, loss_scale=loss_scale)
    expected = sent_by(first, gradient)
    first.settle(is_counted=True)

    for sequence, residual in enumerate((torch.full((20,), 9e17), -torch.ones(20))):
        compression.load("optimizer", {0: residual})
        encoder = encoder_of(compression, sequence, loss_scale)
        sent = sent_by(encoder, gradient)
        encoder.settle(is_counted=True)
        if not sequence:
            assert torch.equal(sent, expected)
            assert torch.equal(
                compression.residuals_of("optimizer")[0][5:15], residual_of(alone)
            )

    (line,) = caplog.messages  # the second residual was sent
    assert line.startswith(
        "in 1 of a push's chunks what earlier ones had not sent was thrown away, since "
        "together with the gradient its norm was not finite or above 1e+18, which no "
        "shard takes; the gradient itself was sent."
    )


def test_a_residual_stays_when_the_gradient_is_not_finite(
    compression: PushCompression, caplog: pytest.LogCaptureFixture
) -> None:
    first = encoder_of(compression)
    sent_by(first, GRADIENT)
    first.settle(is_counted=True)
    before = residual_of(compression)

    skipped = encoder_of(compression, 2)
    sent_by(skipped, GRADIENT * float("inf"))
    skipped.settle(is_counted=False)

    assert torch.equal(residual_of(compression), before)
    assert not caplog.messages


def test_residuals_that_are_thrown_away_again_and_again_are_said_now_and_then(
    compression: PushCompression, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "psworker")
    for sequence in range(100):
        compression.load("optimizer", {0: torch.full((20,), 9e17)})
        encoder = encoder_of(compression, sequence)
        sent_by(encoder, GRADIENT)
        encoder.settle(is_counted=True)

    assert len(caplog.messages) == 2
    assert caplog.messages[1] == (
        "100 pushes were sent without what earlier ones had left out so far"
    )


def test_state_that_is_loaded_is_not_written_over_by_an_earlier_push(
    compression: PushCompression,
) -> None:
    encoder = encoder_of(compression)
    sent_by(encoder, GRADIENT)
    compression.load("optimizer", {0: torch.zeros(20)})
    encoder.settle(is_counted=True)

    assert not residual_of(compression).any()


@pytest.mark.parametrize("push", [None, "int8"])
def test_residuals_of_another_job_are_let_go_where_nothing_is_left_out(
    push: str | None,
) -> None:
    compression = PushCompression(Compression(push=push), SCHEMA)

    compression.load("optimizer", {0: torch.ones(20)})

    assert compression.residuals_of("optimizer") == {}
    assert compression.byte_count == 0


def test_noise_is_of_the_worker_the_push_and_the_chunk() -> None:
    compression = PushCompression(Compression(push="int8"), SCHEMA)
    gradient = torch.linspace(-1, 1, 10)

    first = sent_by(encoder_of(compression), gradient)

    assert torch.equal(first, sent_by(encoder_of(compression), gradient))
    assert not torch.equal(first, sent_by(encoder_of(compression, 2), gradient))
    assert compression.byte_count == 0


def test_a_chunk_of_other_elements_goes_as_it_is(compression: PushCompression) -> None:
    integers = Chunk(
        index=1,
        shard_index=0,
        element_type=ElementType.INT64,
        vector_start=0,
        slices=(Slice(1, 0, 3),),
    )
    elements = torch.ones(3, dtype=torch.int64)
    assert encoder_of(compression).encode(integers, (True,), elements) is None
    plain = PushCompression(Compression(pull="int8"), SCHEMA)
    assert plain.encoder("optimizer", "w0 1", loss_scale=1.0) is None
