"""What the processes of a group tell each other comes as it was, and runs nothing."""

import json
import math
import pickle
import struct
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from pswire.leased_data import DataRange, DataReport
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason
from psworker.backends.backend import LeaderError
from psworker.backends.host import messages
from psworker.backends.host.messages import Answer, Ask, ProcessId
from psworker.backends.host.rendezvous import MESSAGES
from psworker.errors import EvictedError, PsError
from psworker.transport.values import LeaseRequest

RANGE = DataRange("loader", 0, 0, 8)


def again(value: object) -> object:
    return MESSAGES.decode(MESSAGES.encode(value))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -3, 1 << 80, 0.1, math.inf, "généré \ud7ff", b"\0\xff", b""),
        *((), (1, (2.5, "x")), [1, [2]], {1, 2}, frozenset({RANGE}), {(1, 2): [3]}),
        (True,) * 5000,
        Ask(3, None),
        Ask(
            4,
            LeaseRequest(
                loader="loader",
                epoch=1,
                order_digest=(1 << 64) - 1,
                report=DataReport((RANGE,)),
                batch_count_max=2,
                wait=True,
            ),
        ),
        Answer(
            1,
            LeaderError(
                EvictedError, "out", ErrorReason.LIMIT_EXCEEDED, {"clock": "3"}
            ),
        ),
        {ProcessId(0, 7): WorkerKey("a", 1)},
    ],
)
def test_a_value_comes_as_it_was(value: object) -> None:
    found = again(value)
    assert found == value
    assert type(found) is type(value)


def test_tensors_come_with_their_type_and_shape() -> None:
    state = {
        0: {
            "step": torch.tensor(3.0),
            "mean": torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3).T,
            "none": torch.empty(0, 4, dtype=torch.int64),
        }
    }
    found = again(state)
    assert isinstance(found, dict)
    for name, tensor in state[0].items():
        assert found[0][name].dtype == tensor.dtype
        assert torch.equal(found[0][name], tensor)
    found[0]["mean"].add_(1)  # it is its receiver's own


def test_numbers_of_numpy_come_as_numbers() -> None:
    assert again((np.float64(0.5), float("nan"))) != again((0.5, 1.0))
    assert again(np.float64(0.5)) == 0.5


def within(annotation: object) -> Iterator[type]:
    """All classes with fields that an annotation names."""
    if isinstance(annotation, type) and (
        is_dataclass(annotation) or hasattr(annotation, "_fields")
    ):
        yield annotation
    for each in get_args(annotation):
        yield from within(each)


def test_all_classes_within_messages_are_known() -> None:
    """One that is not in the table would fail in the middle of a step."""
    for kind in messages.VALUES:
        for name, annotation in get_type_hints(kind).items():
            assert set(within(annotation)) <= set(messages.VALUES), f"{kind}.{name}"


def test_an_error_of_another_release_is_one_of_psworker() -> None:
    data = MESSAGES.encode(LeaderError(EvictedError, "out"))
    found = MESSAGES.decode(data.replace(b"EvictedError", b"UnheardError"))
    assert found.kind is PsError


class Ran:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("it ran",))


def test_what_is_not_a_value_is_not_sent() -> None:
    with pytest.raises(TypeError, match="is not for a group"):
        MESSAGES.encode((Ran(),))


def _framed(plain: object, rest: bytes = b"") -> bytes:
    head = json.dumps(plain).encode()
    return struct.pack("<I", len(head)) + head + rest


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Ran()),
        b"",
        b"\xff\xff\xff\xff",
        _framed({"tuple": 1}),
        _framed([]),
        _framed(["Path", "/"]),
        _framed(["eval", "1"]),
        _framed(["PsError", "x"]),
        _framed([["tuple"], 1]),
        _framed(["Ask", 1]),
        _framed(["dict", 1]),
        _framed(["set", ["list"]]),
        _framed(["bytes", 3], b"ab"),
        _framed(["bytes", -1], b"ab"),
        _framed(["bytes", "3"], b"abc"),
        _framed(["tensor", 1, 1 << 60], b"abcd"),
        _framed(["tensor", 1, -1], b"abcd"),
        _framed(["tensor", 99, 1], b"abcd"),
        _framed(None, b"more"),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no value of a group"):
        MESSAGES.decode(data)
