"""What values of a JSON file have to be like, each checked by its place in the file.

A file may be any bytes that somebody has sealed: what is wrong is said by the field and
by what was expected there, before anything is made of it.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from pswire.checkpoint.errors import DamagedError
from pswire.limits import NUMBER_MAX
from pswire.names import printable

Shape = Callable[[object, str], None]
"""Checks a value at a place, and raises `DamagedError`."""

_SHOWN_LENGTH: Final = 64


def _refuse(value: object, place: str, expected: str) -> None:
    shown = printable(repr(value)[:_SHOWN_LENGTH])
    raise DamagedError(f"its field {place} is {shown}, and not {expected}")


def number(least: int = 0, most: int = NUMBER_MAX) -> Shape:
    """A whole number in a range, both ends included."""

    def check(value: object, place: str) -> None:
        if type(value) is not int or not least <= value <= most:
            _refuse(value, place, f"a whole number from {least} to {most}")

    return check


def real(value: object, place: str) -> None:
    """A number, whole or not, be it none that is finite."""
    is_whole = type(value) is int and abs(value) <= NUMBER_MAX
    if type(value) is not float and not is_whole:
        _refuse(value, place, "a number")


def text(value: object, place: str) -> None:
    if not isinstance(value, str):
        _refuse(value, place, "a text")


def flag(value: object, place: str) -> None:
    if not isinstance(value, bool):
        _refuse(value, place, "true or false")


def anything(value: object, place: str) -> None:
    """Whatever else checks."""


def optional(shape: Shape) -> Shape:
    """A value, or null."""

    def check(value: object, place: str) -> None:
        if value is not None:
            shape(value, place)

    return check


def one_of(values: tuple[int, ...]) -> Shape:
    """One of some whole numbers."""

    def check(value: object, place: str) -> None:
        if type(value) is not int or value not in values:
            _refuse(value, place, f"one of {', '.join(map(str, values))}")

    return check


def rows(shape: Shape) -> Shape:
    """A list of any length."""

    def check(value: object, place: str) -> None:
        if not isinstance(value, list):
            _refuse(value, place, "a list")
            return
        for index, each in enumerate(value):
            shape(each, f"{place}[{index}]")

    return check


def row(*shapes: Shape) -> Shape:
    """A list of just these."""

    def check(value: object, place: str) -> None:
        if not isinstance(value, list) or len(value) != len(shapes):
            _refuse(value, place, f"a list of {len(shapes)}")
            return
        for index, (each, shape) in enumerate(zip(value, shapes, strict=True)):
            shape(each, f"{place}[{index}]")

    return check


def names_of(shape: Shape) -> Shape:
    """An object of any names."""

    def check(value: object, place: str) -> None:
        if not isinstance(value, dict):
            _refuse(value, place, "an object")
            return
        for name, each in value.items():
            shape(each, f"{place}.{printable(name)[:_SHOWN_LENGTH]}")

    return check


def fields(shapes: Mapping[str, Shape], *, added: Collection[str] = ()) -> Shape:
    """An object of just these fields.

    Args:
        shapes: Of each field.
        added: Fields that files of before lack, which are as good.
    """

    def check(value: object, place: str) -> None:
        if (
            not isinstance(value, dict)
            or set(shapes) - {*value, *added}
            or (set(value) - set(shapes))
        ):
            found = sorted(value) if isinstance(value, dict) else value
            _refuse(found, place, f"an object of {', '.join(shapes)}")
            return
        for name in value:
            shapes[name](value[name], f"{place}.{name}")

    return check
