"""Forged pushes that are one message, by `PushPullOnce`."""

import pytest

from pswire.reasons import ErrorReason
from tests.integration.forged_calls import (
    TIMEOUT_S,
    Target,
    check_refused_at_once,
    refusal_of,
    streamed,
)
from tests.integration.test_hostile_calls import PUSHES


@pytest.mark.parametrize("case", sorted(PUSHES.keys() - {"nothing"}))
def test_a_forged_push_in_one_message_changes_nothing(
    target: Target, case: str
) -> None:
    check_refused_at_once(target, PUSHES[case])


@pytest.mark.parametrize("field", ["header", "trailer"])
def test_a_push_in_one_message_has_header_and_trailer(
    target: Target, field: str
) -> None:
    before = target.state()
    call = streamed(target.channel, "PushPullOnce")
    message = target.trailer() if field == "header" else target.header()

    _, text, reason = refusal_of(call(iter([message]), timeout=TIMEOUT_S))

    assert reason == ErrorReason.MALFORMED_MESSAGE
    assert "a push in one message has a header and a trailer" in text
    assert target.state() == before
