"""Values of a closed set of classes as bytes, for the processes of a group.

JSON says what they are, and bytes and tensors follow it in order. Reading them runs
nothing, and makes nothing but plain values, tensors and those classes. In the JSON a
list is whatever is not plain by itself, with its kind first.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import prod
from typing import Any, Final

import torch

from pswire.schema import ElementType
from pswire.torch_types import bytes_of, element_type_of, tensor_from_buffer
from psworker.errors import PsError

_LENGTH: Final = struct.Struct("<I")
_PLAIN: Final = frozenset({type(None), bool, int, float, str})
_SEQUENCES: Final = {kind.__name__: kind for kind in (tuple, list, set, frozenset)}
_DICT, _BYTES, _TENSOR, _ERROR = "dict", "bytes", "tensor", "error"


class ValueCodec:
    """Writes and reads values of these classes, and what they may hold.

    That is `None`, numbers, texts, bytes, dense tensors, tuples, lists, sets,
    dictionaries, and the classes of psworker's errors themselves.
    """

    def __init__(self, *classes: type) -> None:
        """Takes dataclasses, named tuples and enumerations."""
        self._fields = {kind: _fields_of(kind) for kind in classes}
        self._classes = {kind.__name__: kind for kind in classes}
        assert len(self._classes) == len(classes), "two classes have one name"

    def encode(self, value: object) -> bytes:
        """Writes a value.

        Raises:
            TypeError: It has something of another class.
        """
        blobs: list[bytes] = []
        head = json.dumps(self._plain(value, blobs), separators=(",", ":")).encode()
        return b"".join((_LENGTH.pack(len(head)), head, *blobs))

    def decode(self, data: bytes) -> Any:  # noqa: ANN401, any of them
        """Reads what `encode` wrote.

        Raises:
            ValueError: It did not write this.
        """
        try:
            (length,) = _LENGTH.unpack_from(data)
            start = _LENGTH.size + length
            blobs = _Blobs(data, start)
            value = self._value(json.loads(data[_LENGTH.size : start]), blobs)
            blobs.check_end()
        except (
            *(LookupError, RecursionError, RuntimeError),
            *(TypeError, ValueError, struct.error),
        ) as error:
            raise ValueError(f"no value of a group: {str(error)[:128]!a}") from None
        return value

    def _plain(self, value: Any, blobs: list[bytes]) -> object:  # noqa: ANN401, any
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in self._fields:
            if isinstance(value, Enum):
                return [kind.__name__, value.value]
            own = (getattr(value, name) for name in self._fields[kind])
            return [kind.__name__, *(self._plain(each, blobs) for each in own)]
        if kind in _SEQUENCES.values():
            if _PLAIN.issuperset(map(type, value)):  # as thousands of flags are
                return [kind.__name__, *value]
            return [kind.__name__, *(self._plain(each, blobs) for each in value)]
        if isinstance(value, Mapping):
            flat = (part for pair in value.items() for part in pair)
            return [_DICT, *(self._plain(each, blobs) for each in flat)]
        if kind is bytes:
            blobs.append(value)
            return [_BYTES, len(value)]
        if isinstance(value, torch.Tensor):
            blobs.append(bytes_of(value).cpu().numpy().tobytes())
            return [_TENSOR, int(element_type_of(value.dtype)), *value.shape]
        if isinstance(value, type) and issubclass(value, PsError):
            return [_ERROR, value.__name__]
        for plain in (int, float, str):  # numbers of numpy, texts that are an Enum
            if isinstance(value, plain):
                return plain(value)
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} is not for a group")

    def _value(self, plain: Any, blobs: "_Blobs") -> Any:  # noqa: ANN401, of JSON
        if type(plain) in _PLAIN:
            return plain
        if not isinstance(plain, list):
            raise TypeError("an object is of no kind")
        name, *items = plain
        if name == _BYTES:
            return blobs.taken(*items)
        if name == _TENSOR:
            return blobs.tensor(*items)
        if name == _ERROR:
            return _error_class(*items)
        if not _PLAIN.issuperset(map(type, items)):
            items = [self._value(each, blobs) for each in items]
        if name == _DICT:
            return dict(zip(items[::2], items[1::2], strict=True))
        if name in _SEQUENCES:
            return _SEQUENCES[name](items)
        kind = self._classes[name]
        if issubclass(kind, Enum):
            return kind(*items)
        return kind(**dict(zip(self._fields[kind], items, strict=True)))


class _Blobs:
    """What follows the JSON, taken in order."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._start = start

    def taken(self, byte_count: int) -> bytes:
        stop = self._start + byte_count
        if byte_count < 0 or stop > len(self._data):
            raise ValueError(f"{byte_count} bytes are not there")
        found = self._data[self._start : stop]
        self._start = stop
        return found

    def tensor(self, number: int, *shape: int) -> torch.Tensor:
        element_type = ElementType(number)
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("a size of a tensor is none")
        data = self.taken(prod(shape) * element_type.byte_count)
        flat = tensor_from_buffer(memoryview(data), element_type)
        return flat.clone().reshape(shape)

    def check_end(self) -> None:
        if self._start != len(self._data):
            raise ValueError(f"{len(self._data) - self._start} bytes are left over")


def _fields_of(kind: type) -> tuple[str, ...]:
    if is_dataclass(kind):
        return tuple(each.name for each in fields(kind))
    return tuple(getattr(kind, "_fields", ()))


def _error_class(name: str) -> type[PsError]:
    """The class of an error; the base of all for one that this process lacks."""
    return next((each for each in _errors(PsError) if each.__name__ == name), PsError)


def _errors(kind: type[PsError]) -> Iterator[type[PsError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _errors(each)
