"""How a job sends fewer bytes: the choice that its workers and shards share. Pure."""

import math
import re
from dataclasses import dataclass
from typing import Final, Self

from pswire.encodings.known import ENCODINGS, RATIO, Encoding
from pswire.limits import VALUES_PART_BYTES
from pswire.reasons import ErrorReason, Refusal

RATIO_MAX: Final = 0.5
"""Largest ratio of `topk`: of more elements the places take as much as is saved."""

_TEXT: Final = re.compile(r"push=(\w+) pull=(\w+) ratio=(\S+)")
_RAW: Final = "raw"

ENCODING_NAMES: Final = frozenset({*ENCODINGS, _RAW})
"""Of what gradients and values are sent in."""


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
    ratio: float = RATIO

    def __post_init__(self) -> None:
        """Checks what was given.

        Raises:
            ValueError: An encoding is unknown, or the ratio out of its range.
        """
        for name in ("push", "pull"):
            given = getattr(self, name)
            if given is not None and given not in list(ENCODINGS):
                raise ValueError(
                    f"{name}={given!r} is no way to send fewer bytes: there are "
                    f"{', '.join(map(repr, ENCODINGS))}, and None to send everything "
                    "as it is"
                )
        ratio = self.ratio
        is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if not is_number or not (math.isfinite(ratio) and 0 < ratio <= RATIO_MAX):
            raise ValueError(
                f"ratio={ratio!r} is no share of elements to send: it must be more "
                f"than 0 and at most {RATIO_MAX:g}"
            )
        object.__setattr__(self, "ratio", float(ratio))

    @property
    def push_encoding(self) -> Encoding | None:
        return None if self.push is None else ENCODINGS[self.push]

    @property
    def pull_encoding(self) -> Encoding | None:
        """How values come."""
        return None if self.pull is None else ENCODINGS[self.pull]

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
        used = (self.push_encoding, self.pull_encoding)
        takes_ratio = any(each is not None and each.takes_ratio for each in used)
        ratio = self.ratio if takes_ratio else RATIO
        return f"push={self.push or _RAW} pull={self.pull or _RAW} ratio={ratio!r}"

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


NO_COMPRESSION: Final = Compression()
"""Everything goes as it is."""
