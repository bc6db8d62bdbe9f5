"""A call that says too little."""

import pytest

from pswire.reasons import ErrorReason
from tests.integration.forged_calls import TIMEOUT_S, Target, refusal_of, streamed


@pytest.mark.parametrize("method", ["PushPull", "Push"])
@pytest.mark.parametrize("has_chunk", [False, True])
def test_a_push_that_ends_without_its_trailer_is_refused(
    target: Target, method: str, *, has_chunk: bool
) -> None:
    """Nothing can complete it, and nobody is waited for that it could name."""
    before = target.state()
    sent = [target.header(), target.chunk(target.own)][: 1 + has_chunk]

    call = streamed(target.channel, method)(iter(sent), timeout=TIMEOUT_S)
    _, text, found = refusal_of(call)

    assert found == ErrorReason.MALFORMED_MESSAGE
    assert "the push ended without its trailer" in text
    assert target.state() == before
    target.step()
