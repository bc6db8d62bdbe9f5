"""Fields of protobuf messages, written and read by hand.

Pure. What reads takes hostile bytes; see `frames`.
Source: https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NoReturn

from pswire.reasons import ErrorReason, Refusal

VARINT, FIXED64, LENGTH, GROUP, GROUP_END, FIXED32 = 0, 1, 2, 3, 4, 5

REMEMBERED_COUNT: Final = 1024
"""Prefixes and presences that are remembered: the same in every step, and what is left
of a step of a small model once its few bytes are copied."""

FIXED32_FORMAT: Final = struct.Struct("<I")
FIXED64_FORMAT: Final = struct.Struct("<Q")

_GROUP_DEPTH_MAX = 100  # protobuf's own limit on nesting
_VARINT_BYTES_MAX = 10
_VARINT32_BYTES_MAX = 5  # tags and lengths
_FIELD_NUMBER_MAX = (1 << 29) - 1


def varint(value: int) -> bytes:
    """A number in as many bytes as it needs."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


@lru_cache(REMEMBERED_COUNT)
def length_prefix(field_number: int, length: int) -> bytes:
    """Tag and length of a length-delimited field."""
    return varint(field_number << 3 | LENGTH) + varint(length)


def read_fields(
    view: memoryview, what: str
) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yields number, wire type and value of each field outside of groups.

    Proto3 has no groups, but an unknown one must be skipped: a stack of their numbers
    tells where it ends.
    """
    groups: list[int] = []
    position, end = 0, len(view)
    while position < end:
        start = position
        tag = view[position]
        if tag < 0x80:  # as most are, which need no loop
            position += 1
        else:
            tag, position = _read_varint(view, position, what, _VARINT32_BYTES_MAX)
        number, wire_type = tag >> 3, tag & 7
        if not 1 <= number <= _FIELD_NUMBER_MAX:
            _refuse(what, start, f"field number {number} is out of range")
        value: int | memoryview = 0
        if wire_type == LENGTH:
            length, position = _read_varint(view, position, what, _VARINT32_BYTES_MAX)
            if length > end - position:
                _refuse(what, start, f"field {number} is longer than the rest")
            value = view[position : position + length]
            position += length
        elif wire_type == VARINT:
            value, position = _read_varint(view, position, what, _VARINT_BYTES_MAX)
        elif wire_type in _FIXED_FORMATS:
            fixed = _FIXED_FORMATS[wire_type]
            if fixed.size > end - position:
                _refuse(what, start, f"field {number} is cut off")
            (value,) = fixed.unpack_from(view, position)
            position += fixed.size
        elif wire_type == GROUP:
            groups.append(number)
            if len(groups) > _GROUP_DEPTH_MAX:
                _refuse(what, start, f"more than {_GROUP_DEPTH_MAX} groups are nested")
        elif wire_type == GROUP_END:
            if not groups or groups.pop() != number:
                _refuse(what, start, f"group {number} ends without a beginning")
        else:
            _refuse(what, start, f"field {number} has the wire type {wire_type}")
        if not groups and wire_type != GROUP_END:
            yield number, wire_type, value
    if groups:
        _refuse(what, end, f"group {groups[-1]} has no end")


_FIXED_FORMATS: Final = {FIXED32: FIXED32_FORMAT, FIXED64: FIXED64_FORMAT}


def _read_varint(
    view: memoryview, position: int, what: str, byte_count_max: int
) -> tuple[int, int]:
    """Returns the value, cut to 64 bits, and the position after it."""
    start, end = position, min(len(view), position + byte_count_max)
    value = shift = 0
    while position < end:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position
        shift += 7
    _refuse(what, start, "a varint does not end")


def _refuse(what: str, position: int, why: str) -> NoReturn:
    raise Refusal(
        ErrorReason.MALFORMED_MESSAGE, f"malformed {what}: {why}, at byte {position}"
    )
