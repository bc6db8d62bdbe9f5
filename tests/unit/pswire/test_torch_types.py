"""Tensors and bytes share memory, whatever the type, size and alignment."""

import gc

import pytest
import torch

from pswire.frames import decode_chunk, encode_chunk, split_fields
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType
from pswire.torch_types import (
    TORCH_DTYPES,
    buffer_of,
    element_type_of,
    tensor_from_buffer,
)
from tests.refusals import refused

every_type = pytest.mark.parametrize("element_type", ElementType)


def sample(element_type: ElementType) -> torch.Tensor:
    return torch.arange(-3, 4).to(TORCH_DTYPES[element_type])


@every_type
def test_every_element_type_has_a_dtype_of_its_size(element_type: ElementType) -> None:
    dtype = TORCH_DTYPES[element_type]

    assert dtype.itemsize == element_type.byte_count
    assert element_type_of(dtype) is element_type


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_another_dtype_is_refused_with_those_allowed(dtype: torch.dtype) -> None:
    with refused(ErrorReason.UNSUPPORTED, r"allowed are float32, float64.*bool"):
        element_type_of(dtype)


@every_type
@pytest.mark.parametrize("read_only", [True, False])
def test_bytes_of_a_tensor_make_the_same_tensor(
    element_type: ElementType, read_only: bool
) -> None:
    tensor = sample(element_type)
    copied = bytes(buffer_of(tensor)) if read_only else bytearray(buffer_of(tensor))

    # pytest turns PyTorch's warning about read-only memory into an error.
    read = tensor_from_buffer(memoryview(copied), element_type)

    assert read.dtype is tensor.dtype
    assert torch.equal(read, tensor)


@every_type
@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (1,), (2, 3)])
def test_every_shape_has_its_bytes(
    element_type: ElementType, shape: tuple[int, ...]
) -> None:
    tensor = torch.ones(shape, dtype=TORCH_DTYPES[element_type])

    view = buffer_of(tensor)

    assert view.nbytes == len(view) == tensor.numel() * element_type.byte_count
    assert torch.equal(tensor_from_buffer(view, element_type), tensor.reshape(-1))


def test_bytes_are_shared_both_ways() -> None:
    tensor = torch.zeros(4)
    view = buffer_of(tensor)
    read = tensor_from_buffer(view, ElementType.FLOAT32)

    read[2] = 5.0

    assert tensor.tolist() == [0.0, 0.0, 5.0, 0.0]
    assert read.data_ptr() == tensor.data_ptr()


def test_a_received_chunk_is_read_in_place_and_aligned() -> None:
    message = encode_chunk(3, index=1, presence=b"\1", data=buffer_of(torch.ones(9)))
    ((_, view),) = split_fields(message)
    frame = decode_chunk(view)

    read = tensor_from_buffer(frame.data, ElementType.FLOAT32)

    assert read.data_ptr() % 16 == 0
    assert read.tolist() == [1.0] * 9


def test_a_tensor_keeps_its_message_alive() -> None:
    message = b"head" + bytes(buffer_of(torch.full((100_000,), 7.0)))
    part = tensor_from_buffer(memoryview(message)[4:], ElementType.FLOAT32)[50_000:]

    del message
    gc.collect()
    overwriting = [bytes([1]) * 400_004 for _ in range(8)]

    assert overwriting
    assert bool((part == 7.0).all())


def test_unaligned_bytes_are_read_in_place() -> None:
    tensor = torch.arange(5, dtype=torch.float64)
    message = b"x" + bytes(buffer_of(tensor))

    assert torch.equal(
        tensor_from_buffer(memoryview(message)[1:], ElementType.FLOAT64), tensor
    )


def test_a_parameter_gives_its_bytes() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))

    assert buffer_of(parameter) == buffer_of(torch.ones(2))


def test_bytes_that_end_within_an_element_are_refused() -> None:
    with pytest.raises(Refusal, match="7 bytes are no whole number of float32"):
        tensor_from_buffer(memoryview(bytes(7)), ElementType.FLOAT32)


def test_a_tensor_with_gaps_has_no_bytes_to_share() -> None:
    with pytest.raises(ValueError, match=r"got strides \(1, 3\) on cpu"):
        buffer_of(torch.ones(2, 3).t())
