"""The table of all ways to send elements in fewer bytes. Pure.

Whoever adds one writes a `Codec` in a file of this package and an entry here, and the
number into `push.proto`. The command line and the coordinator read this table and
import no torch, so that an entry names its codec, which is imported when it is used.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from pswire.schema import NARROW_TYPES, ElementType

if TYPE_CHECKING:
    from pswire.encodings.codec import Codec

_FLOAT32: Final = frozenset({ElementType.FLOAT32})
_FLOATS: Final = NARROW_TYPES | _FLOAT32

RATIO: Final = 0.01
"""Share of the elements that is sent, where no other is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """A way to send elements.

    Attributes:
        name: As users give it.
        number: On the wire.
        codec_name: Module and class of its `Codec`.
        element_types: Types whose elements take fewer bytes so. Elements of 64 bits
            were chosen for their digits, and go as they are.
        sends_changes: Whether values are pulled as changes of those that were sent
            before.
        keeps_residual: Whether it leaves out so much of a gradient that this must be
            sent later on. Source: Seide et al., "1-bit stochastic gradient descent",
            Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD", ICML
            2019.
        takes_ratio: Whether its codec is made with the share of elements to send.
    """

    name: str
    number: int
    codec_name: str
    element_types: frozenset[ElementType]
    sends_changes: bool = False
    keeps_residual: bool = False
    takes_ratio: bool = False

    def takes(self, element_type: ElementType) -> bool:
        """Whether elements of a type are sent so."""
        return element_type in self.element_types

    def codec(self, ratio: float = RATIO) -> "Codec":
        """What encodes and decodes; `ratio` is for those that take one."""
        return _made(self.codec_name, (ratio,) if self.takes_ratio else ())


@cache
def _made(codec_name: str, options: tuple[float, ...]) -> "Codec":
    codec: Codec = pkgutil.resolve_name(codec_name)(*options)
    return codec


ENCODINGS: Final[Mapping[str, Encoding]] = MappingProxyType(
    {
        each.name: each
        for each in (
            Encoding(
                name="bf16",
                number=16,
                codec_name="pswire.encodings.bf16:Bf16",
                element_types=_FLOAT32,
            ),
            Encoding(
                name="fp16",
                number=17,
                codec_name="pswire.encodings.fp16:Fp16",
                element_types=_FLOAT32,
            ),
            Encoding(
                name="int8",
                number=18,
                codec_name="pswire.encodings.int8:Int8",
                element_types=_FLOATS,
                sends_changes=True,
            ),
            Encoding(
                name="topk",
                number=19,
                codec_name="pswire.encodings.topk:TopK",
                element_types=_FLOATS,
                sends_changes=True,
                keeps_residual=True,
                takes_ratio=True,
            ),
            Encoding(
                name="onebit",
                number=20,
                codec_name="pswire.encodings.onebit:OneBit",
                element_types=_FLOATS,
                sends_changes=True,
                keeps_residual=True,
            ),
        )
    }
)
"""All of them by name, in the order that texts list them in."""

BY_NUMBER: Final[Mapping[int, Encoding]] = MappingProxyType(
    {each.number: each for each in ENCODINGS.values()}
)
"""All of them, to decode with."""
