"""State that a script has registered, as one safetensors blob. Imports torch.

Tensors are its tensors, and all else is a skeleton of JSON in its metadata. Nothing of
it runs when it is read, and what is read may be any bytes.
"""

import base64
import io
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from safetensors.torch import save

from pswire.byte_text import byte_text
from pswire.checkpoint.errors import UNREADABLE, DamagedError
from pswire.checkpoint.part_head import TensorPlace, read_head
from pswire.limits import STATE_BYTES_MAX
from pswire.names import printable
from pswire.torch_types import TORCH_DTYPES

_SKELETON: Final = "paramserver.state"

_DEPTH_MAX: Final = 64
"""Deepest nesting, be it that of an object which holds itself."""

_INT_BITS_MAX: Final = 8192
"""Largest whole number: random generators of numpy and of Python have some of 128."""

_MAPPINGS: Final[Mapping[str, Callable[..., dict[Any, Any]]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
"""By the name that a skeleton has for them: torch's own schedulers keep counters."""

_FLOATS: Final = ("nan", "inf", "-inf")
"""What JSON has no number for."""


class NotStorableError(Exception):
    """A state has something that is neither a tensor nor plain."""


def encode_states(states: Mapping[str, object]) -> bytes:
    """Writes what `state_dict()` has returned, by the names of the objects.

    Raises:
        NotStorableError: A value is of a kind that can't be stored, or all together
            are too large; the text names it.
    """
    writer = _Writer()
    skeleton = {name: writer.plain(value, name) for name, value in states.items()}
    data = save(writer.tensors, {_SKELETON: json.dumps(skeleton)})
    writer.add(len(data))
    return data


def decode_states(data: bytes) -> dict[str, Any]:
    """Reads what `encode_states` has written; tensors are on the CPU.

    Raises:
        DamagedError: It has not written this.
    """
    if len(data) > STATE_BYTES_MAX:
        raise DamagedError(f"it has {len(data)} bytes, of at most {STATE_BYTES_MAX}")
    head = read_head(io.BytesIO(data), len(data))  # type: ignore[arg-type]
    try:
        skeleton = json.loads(head.metadata[_SKELETON])
        if not isinstance(skeleton, dict):
            raise TypeError("its skeleton is no object")
        reader = _Reader(data, head.tensors)
        return {name: reader.value(each) for name, each in skeleton.items()}
    except UNREADABLE as error:
        raise DamagedError(
            f"it is no registered state: {type(error).__name__}, "
            f"{printable(str(error))[:128]}"
        ) from error


class _Writer:
    """Makes the skeleton, and collects what goes beside it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._byte_count = 0

    def add(self, byte_count: int) -> None:
        """Counts bytes before they are copied, and once more all that is made."""
        self._byte_count += byte_count
        if max(byte_count, self._byte_count // 2) > STATE_BYTES_MAX:
            raise NotStorableError(
                f"it has more than {byte_text(STATE_BYTES_MAX)}, and is stored with "
                "each checkpoint by one worker: make large tensors parameters or "
                "buffers of a model that is prepared"
            )

    def plain(self, value: object, path: str, depth: int = 0) -> object:
        if depth > _DEPTH_MAX:
            raise NotStorableError(f"{path[:128]}... is nested too deep, or in itself")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            if value.bit_length() > _INT_BITS_MAX:
                raise NotStorableError(f"{path} has {value.bit_length()} bits")
            return int(value)
        if isinstance(value, float):
            number = float(value)
            return number if math.isfinite(number) else {"float": str(number)}
        if isinstance(value, str):
            self.add(len(value))
            return str(value)
        if isinstance(value, bytes):
            self.add(len(value))
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._put(value, path)}
        if type(value) is list or type(value) is tuple:
            self.add(len(value))
            items = [
                self.plain(each, f"{path}[{index}]", depth + 1)
                for index, each in enumerate(value)
            ]
            return items if type(value) is list else {"tuple": items}
        for name, kind in _MAPPINGS.items():
            if type(value) is kind and isinstance(value, dict):
                self.add(len(value))
                return {name: self._pairs(value, path, depth)}
        raise NotStorableError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, and a "
            "checkpoint takes tensors, dict, list, tuple, None, bool, int, float, str "
            "and bytes: let state_dict() return these, such as .item() or .tolist() of "
            "an array"
        )

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[object]:
        found: list[object] = []
        for key, each in value.items():
            if not isinstance(key, str | int | float | bytes | tuple | None):
                raise NotStorableError(
                    f"{path} has a key of type {type(key).__qualname__}"
                )
            place = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"
            key_plain = self.plain(key, f"key {place}", depth + 1)
            found.append([key_plain, self.plain(each, place, depth + 1)])
        return found

    def _put(self, tensor: torch.Tensor, path: str) -> str:
        if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES:
            raise NotStorableError(
                f"{path} is a tensor of {tensor.layout} and {tensor.dtype}, and a "
                "checkpoint takes dense ones of floats, whole numbers and bool"
            )
        self.add(tensor.numel() * tensor.element_size())
        name = str(len(self.tensors))
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name


_DTYPES: Final = frozenset(TORCH_DTYPES.values())


class _Reader:
    """Makes values of a skeleton."""

    def __init__(self, data: bytes, places: Mapping[str, TensorPlace]) -> None:
        self._data = data
        self._places = places

    def value(self, plain: Any, depth: int = 0) -> Any:  # noqa: ANN401, any state
        if depth > _DEPTH_MAX:
            raise ValueError("it is nested too deep")
        if isinstance(plain, list):
            return [self.value(each, depth + 1) for each in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, inner),) = plain.items()
        match kind:
            case "float" if inner in _FLOATS:
                return float(inner)
            case "bytes":
                return base64.b64decode(inner, validate=True)
            case "tensor":
                return self._tensor(self._places[inner])
            case "tuple" if isinstance(inner, list):
                return tuple(self.value(each, depth + 1) for each in inner)
        pairs = {
            self.value(key, depth + 1): self.value(each, depth + 1)
            for key, each in inner
        }
        return _MAPPINGS[kind](pairs)

    def _tensor(self, place: TensorPlace) -> torch.Tensor:
        tensor = torch.empty(place.shape, dtype=TORCH_DTYPES[place.element_type])
        if place.byte_count:
            stop = place.start + place.byte_count
            whole = torch.frombuffer(
                bytearray(self._data[place.start : stop]), dtype=tensor.dtype
            )
            tensor.copy_(whole.reshape(place.shape))
        return tensor
