"""What a worker says of a clock when it commits it."""

import math
from typing import Any

import pytest

from psserver.shard.rpc.push_codec import worker_choice
from pswire.membership import ClockChoice
from pswire.reasons import ErrorReason
from pswire.v1 import membership_pb2
from tests.doubles.core_values import key
from tests.refusals import refused


def said(**fields: Any) -> membership_pb2.ClockChoice:  # noqa: ANN401
    worker = membership_pb2.WorkerIdentity(worker_id="a", incarnation=1)
    return membership_pb2.ClockChoice(clock=3, workers=[worker], **fields)


def test_a_scale_that_is_not_said_is_to_follow() -> None:
    found = worker_choice(said())
    assert found == ClockChoice(3, (key("a"),), 0.0, 0.0)
    assert not found.is_scaled


def test_the_sum_and_the_scale_are_read() -> None:
    found = worker_choice(said(sum_of_squares=0.3, gradient_scale=0.1))
    assert found == ClockChoice(3, (key("a"),), 0.3, 0.1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sum_of_squares": math.nan}, "sum of squares nan is not finite"),
        ({"sum_of_squares": math.inf}, "sum of squares inf is not finite"),
        ({"sum_of_squares": -1.0}, "sum of squares -1.0 is not finite and at least 0"),
        ({"gradient_scale": math.nan}, "gradient scale nan is not in 0 to 1"),
        ({"gradient_scale": 1.5}, "gradient scale 1.5 is not in 0 to 1"),
        ({"gradient_scale": -0.5}, "gradient scale -0.5 is not in 0 to 1"),
    ],
)
def test_numbers_that_are_none_are_refused(fields: dict[str, float], text: str) -> None:
    with refused(ErrorReason.MALFORMED_MESSAGE, text):
        worker_choice(said(**fields))
