"""Fields of protobuf messages, written and read by hand.

Pure. What reads takes hostile bytes; see `frames`.
Source: https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, NoReturn, TypeAlias, Union

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
    view: memoryview, what: str, *, count_max: int
) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yields number, wire type and value of each field outside of groups.

    Proto3 has no groups, but an unknown one must be skipped: a stack of their numbers
    tells where it ends.

    Args:
        view: The message.
        what: What it is, for the text of a refusal.
        count_max: Most fields, also those within groups and unknown ones.

    Raises:
        Refusal: `MALFORMED_MESSAGE`, or `LIMIT_EXCEEDED` for more fields.
    """
    groups: list[int] = []
    position, end = 0, len(view)
    count = 0
    while position < end:
        start = position
        count += 1
        if count > count_max:
            _refuse_count(what, count_max)
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


Shape: TypeAlias = Mapping[int, Union["Shape", None]]
"""What may be many in a message: of each field that is a message its own shape, of each
that may be a packed run of varints `None`. All other fields are not looked into."""


def check_field_count(data: bytes, shape: Shape, what: str, *, count_max: int) -> None:
    """Counts the fields of a message and of those within, before it is parsed.

    Each costs a parser far more memory than its bytes. A short message is not looked
    at: a field, or an element of a packed run, has a byte at least. What is not well
    formed is left to the parser, which gets no further than the count.

    Raises:
        Refusal: `LIMIT_EXCEEDED`.
    """
    if len(data) <= count_max:
        return
    count = 0
    position, end = 0, len(data)
    outer: list[tuple[int, Shape]] = []
    while True:
        while position >= end:
            if not outer:
                return
            end, shape = outer.pop()
        count += 1
        if count > count_max:
            _refuse_count(what, count_max)
        tag = data[position]
        position += 1
        if tag >= 0x80:
            tag, position = _varint_within(data, position - 1, end)
            if position > end:
                return
        wire_type = tag & 7
        if wire_type == VARINT:
            while position < end and data[position] >= 0x80:
                position += 1
            position += 1
        elif wire_type == LENGTH:
            if position < end and data[position] < 0x80:  # as most are
                stop = position + 1 + data[position]
                position += 1
            else:
                length, position = _varint_within(data, position, end)
                stop = position + length
            if stop > end:
                return
            number = tag >> 3
            if number not in shape:
                position = stop
                continue
            inner = shape[number]
            if inner is None:
                # Each varint has one byte without the upper bit, its last.
                count += len(data[position:stop].translate(None, _CONTINUED_BYTES)) - 1
                if count > count_max:
                    _refuse_count(what, count_max)
                position = stop
            else:
                outer.append((end, shape))
                end, shape = stop, inner
        elif wire_type in _FIXED_FORMATS:
            position += _FIXED_FORMATS[wire_type].size
        elif wire_type > FIXED32:
            return


_CONTINUED_BYTES: Final = bytes(range(0x80, 0x100))


def _varint_within(data: bytes, position: int, end: int) -> tuple[int, int]:
    """As `_read_varint`; the position after one that does not end is beyond the end."""
    value = shift = 0
    for byte in data[position : min(end, position + _VARINT_BYTES_MAX)]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return 0, end + 1


def _refuse_count(what: str, count_max: int) -> NoReturn:
    raise Refusal(
        ErrorReason.LIMIT_EXCEEDED,
        f"a {what} has more than {count_max} fields, which none needs",
    )


def _refuse(what: str, position: int, why: str) -> NoReturn:
    raise Refusal(
        ErrorReason.MALFORMED_MESSAGE, f"malformed {what}: {why}, at byte {position}"
    )
