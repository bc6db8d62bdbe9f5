"""How a job sends fewer bytes: the choice that its workers and shards share. Pure."""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from pswire.limits import VALUES_PART_BYTES
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import NARROW_TYPES, ElementType

RATIO_MAX: Final = 0.5
"""Largest ratio of `topk`: of more elements the places take as much as is saved."""

_TEXT: Final = re.compile(r"push=(\w+) pull=(\w+) ratio=(\S+)")
_RAW: Final = "raw"


class Method(StrEnum):
    """A way to send elements, by the name that users give."""

    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    TOPK = "topk"
    ONEBIT = "onebit"

    def takes(self, element_type: ElementType) -> bool:
        """Whether elements of a type take fewer bytes so.

        Elements of 64 bits were chosen for their digits, and go as they are.
        """
        if element_type in NARROW_TYPES:
            return self not in (Method.BF16, Method.FP16)
        return element_type is ElementType.FLOAT32

    @property
    def sends_changes(self) -> bool:
        """Whether values are pulled as changes of those that were sent before."""
        return self not in (Method.BF16, Method.FP16)


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients and values are sent.

    Attributes:
        push: How gradients go to the shards: `"bf16"`, `"fp16"`, `"int8"`, `"topk"` or
            `"onebit"`; `None` for as they are.
        pull: How values come from them, as `push`.
        ratio: Share of the elements that `topk` sends, more than 0 and at most 0.5.
    """

    push: str | None = None
    pull: str | None = None
    ratio: float = 0.01

    def __post_init__(self) -> None:
        """Takes methods by their names too.

        Raises:
            ValueError: A method is unknown, or the ratio out of its range.
        """
        for name in ("push", "pull"):
            object.__setattr__(self, name, _method(name, getattr(self, name)))
        ratio = self.ratio
        is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if not is_number or not (math.isfinite(ratio) and 0 < ratio <= RATIO_MAX):
            raise ValueError(
                f"ratio={ratio!r} is no share of elements to send: it must be more "
                f"than 0 and at most {RATIO_MAX:g}"
            )
        object.__setattr__(self, "ratio", float(ratio))

    @property
    def push_method(self) -> Method | None:
        """How gradients go."""
        return _method("push", self.push)

    @property
    def pull_method(self) -> Method | None:
        """How values come."""
        return _method("pull", self.pull)

    @property
    def is_none(self) -> bool:
        """Whether everything goes as it is."""
        return self.push is None and self.pull is None

    def chunk_bytes(self, asked: int) -> int:
        """Bytes of a full chunk, as `place` takes them.

        Args:
            asked: What the job's settings have; 0 for nothing.
        """
        if self.is_none:
            return asked
        return min(asked or VALUES_PART_BYTES, VALUES_PART_BYTES)

    def __str__(self) -> str:
        """As it goes over the wire; equal for what works alike. Empty for none."""
        if self.is_none:
            return ""
        uses_ratio = Method.TOPK in (self.push, self.pull)
        ratio = f" ratio={self.ratio!r}" if uses_ratio else " ratio=0.01"
        return f"push={self.push or _RAW} pull={self.pull or _RAW}{ratio}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what `str` wrote.

        Raises:
            Refusal: `MALFORMED_MESSAGE`.
        """
        if not text:
            return cls()
        match = _TEXT.fullmatch(text)
        try:
            if match is None:
                raise ValueError("it is not as this release writes it")
            push, pull, ratio = match.groups()
            return cls(
                None if push == _RAW else push,
                None if pull == _RAW else pull,
                float(ratio),
            )
        except ValueError as error:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"compression {text[:128]!r} can't be read: {error}",
            ) from None


def _method(name: str, value: object) -> Method | None:
    """A method by its name.

    Raises:
        ValueError: There is none.
    """
    if value is None:
        return None
    try:
        return Method(str(value))
    except ValueError:
        known = ", ".join(repr(str(each)) for each in Method)
        raise ValueError(
            f"{name}={value!r} is no way to send fewer bytes: there are {known}, and "
            "None to send everything as it is"
        ) from None


NO_COMPRESSION: Final = Compression()
"""Everything goes as it is."""
