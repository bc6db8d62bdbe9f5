"""A call that says nothing: it may be tried again."""

import threading
from collections.abc import Iterator

import pytest

from pswire.reasons import CATALOGUE, ErrorReason
from tests.integration.forged_calls import TIMEOUT_S, Target, refusal_of, streamed


def test_a_push_that_is_silent_may_be_tried_again(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose interpreter stands still between call and message does that."""
    monkeypatch.setattr("psserver.shard.rpc.push_call.FIRST_MESSAGE_TIMEOUT_S", 0.05)
    before = target.state()
    is_over = threading.Event()

    def silence() -> Iterator[bytes]:
        is_over.wait(TIMEOUT_S)
        yield from ()

    call = streamed(target.channel, "PushPull")(silence(), timeout=TIMEOUT_S)
    try:
        _, text, found = refusal_of(call)
    finally:
        is_over.set()

    assert found == ErrorReason.WAIT_TIMEOUT
    assert CATALOGUE[ErrorReason.WAIT_TIMEOUT].retryable
    assert "silent for 0.05 s" in text
    assert target.state() == before


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
