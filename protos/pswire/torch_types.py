"""Element types and PyTorch's; bytes as tensors and tensors as bytes, without copies.

This and `optimizer_states` are the modules of pswire that import torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType

TORCH_DTYPES: Final[Mapping[ElementType, torch.dtype]] = MappingProxyType(
    {
        ElementType.FLOAT32: torch.float32,
        ElementType.FLOAT64: torch.float64,
        ElementType.FLOAT16: torch.float16,
        ElementType.BFLOAT16: torch.bfloat16,
        ElementType.INT64: torch.int64,
        ElementType.INT32: torch.int32,
        ElementType.INT16: torch.int16,
        ElementType.INT8: torch.int8,
        ElementType.UINT8: torch.uint8,
        ElementType.BOOL: torch.bool,
    }
)
"""PyTorch's type of each element type."""

_ELEMENT_TYPES: Final = {dtype: item for item, dtype in TORCH_DTYPES.items()}


def element_type_of(dtype: torch.dtype) -> ElementType:
    """Returns the element type of a PyTorch type.

    Raises:
        Refusal: `UNSUPPORTED`, with the types that are allowed.
    """
    element_type = _ELEMENT_TYPES.get(dtype)
    if element_type is None:
        allowed = ", ".join(item.name.lower() for item in ElementType)
        raise Refusal(
            ErrorReason.UNSUPPORTED, f"{dtype} can't be sent; allowed are {allowed}"
        )
    return element_type


_NUMPY_DTYPES: Final = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in TORCH_DTYPES.values()
    if dtype is not torch.bfloat16
}
"""numpy's type of each PyTorch type, but for the one that it lacks."""


_BYTES: Final = np.dtype(np.uint8)


class _Borrowed:
    """Memory of a read-only view, offered to numpy as writable.

    `torch.frombuffer` and `torch.from_numpy` warn about read-only memory, and silencing
    a warning is a change for the whole process, in every thread. numpy takes this
    object as the owner of the memory, so the view lives as long as any tensor over it.
    """

    def __init__(self, view: memoryview, dtype: "np.dtype[Any]") -> None:
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        self.view = view
        self.__array_interface__ = {
            "version": 3,
            "shape": (view.nbytes // dtype.itemsize,),
            "typestr": dtype.str,
            "data": (address, False),
        }


def tensor_from_buffer(view: memoryview, element_type: ElementType) -> torch.Tensor:
    """Makes a 1-D tensor over the bytes, sharing them.

    Args:
        view: Contiguous bytes, a whole number of elements. If they are read-only, as
            those of a received message, the tensor must not be written to.
        element_type: Type of the elements.

    Raises:
        Refusal: `MALFORMED_MESSAGE` when the bytes are not a whole number of elements.
    """
    dtype = TORCH_DTYPES[element_type]
    if view.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    if view.nbytes % element_type.byte_count:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"{view.nbytes} bytes are no whole number of {element_type.name.lower()}",
        )
    if not view.readonly:
        return torch.frombuffer(view, dtype=dtype)
    own = _NUMPY_DTYPES.get(dtype)
    if own is not None:
        return torch.from_numpy(np.asarray(_Borrowed(view, own)))
    return torch.from_numpy(np.asarray(_Borrowed(view, _BYTES))).view(dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor in C order, 1-D, on its device.

    They are shared with the tensor, unless it has gaps.
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor, sharing them.

    The view keeps the memory alive.

    Raises:
        ValueError: The tensor is elsewhere or has gaps.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous CPU tensor, got strides {tensor.stride()} on "
            f"{tensor.device}"
        )
    if tensor.numel() == 0:
        return memoryview(b"")
    if tensor.dtype in _NUMPY_DTYPES and tensor.ndim and not tensor.requires_grad:
        return tensor.numpy().data.cast("B")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
