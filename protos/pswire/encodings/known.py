"""All encodings, by number and by the name that users give."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pswire.compression import Method
from pswire.encodings.bf16 import Bf16
from pswire.encodings.encoding import Encoding
from pswire.encodings.fp16 import Fp16
from pswire.encodings.int8 import Int8
from pswire.encodings.onebit import OneBit
from pswire.encodings.topk import TopK

_BY_METHOD: Final[Mapping[Method, Encoding]] = MappingProxyType(
    {
        Method.BF16: Bf16(),
        Method.FP16: Fp16(),
        Method.INT8: Int8(),
        Method.TOPK: TopK(),
        Method.ONEBIT: OneBit(),
    }
)

ENCODINGS: Final[Mapping[int, Encoding]] = MappingProxyType(
    {encoding.number: encoding for encoding in _BY_METHOD.values()}
)
"""By number, to decode with."""


def encoding_of(method: Method, ratio: float) -> Encoding:
    """The encoding to encode with.

    Args:
        method: Its name.
        ratio: Share of the elements that `topk` sends.
    """
    return TopK(ratio) if method is Method.TOPK else _BY_METHOD[method]
