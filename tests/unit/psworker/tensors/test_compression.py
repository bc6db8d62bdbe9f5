"""How a user says how to send fewer bytes."""

import pytest

from pswire.encodings.known import ENCODINGS
from psworker.errors import ConfigurationError
from psworker.tensors.compression import Compression, read_compression


def test_a_name_is_for_both_directions() -> None:
    assert read_compression(None).is_none
    assert read_compression("int8") == Compression("int8", "int8")
    chosen = Compression(push="topk", ratio=0.05)
    assert read_compression(chosen) is chosen


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    text = (
        "compression='zip' is no way to send fewer bytes: give one of "
        f"{', '.join(map(repr, ENCODINGS))}, or a psworker.Compression, or leave it out"
    )
    with pytest.raises(ConfigurationError, match=text):
        read_compression("zip")
