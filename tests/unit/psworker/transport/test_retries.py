"""A call that is made again: what is said meanwhile, and what ends it."""

import logging

import pytest

from pswire.reasons import ErrorReason, Refusal
from psworker.transport.calls import CallError, now, until_decided

FULL = Refusal(ErrorReason.STATE_NOT_WRITTEN, "the coordinator can't write its state")


def failed(refusal: Refusal | None) -> CallError:
    code = "DEADLINE_EXCEEDED" if refusal is None else "UNAVAILABLE"
    return CallError("peer", code, "text", refusal=refusal, decided=False)


async def test_what_was_refused_is_said_though_the_deadline_ends_the_last_try() -> None:
    refusals = iter([FULL])

    async def attempt(left_s: float) -> None:
        raise failed(next(refusals, None))

    with pytest.raises(CallError) as caught:
        await until_decided(attempt, now() + 0.2)
    assert caught.value.refusal is FULL


async def test_without_a_refusal_the_last_failure_is_raised() -> None:
    async def attempt(left_s: float) -> None:
        raise failed(None)

    with pytest.raises(CallError) as caught:
        await until_decided(attempt, now())
    assert caught.value.code == "DEADLINE_EXCEEDED"


async def test_what_somebody_has_to_do_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = [failed(FULL), failed(FULL), failed(None)]

    async def attempt(left_s: float) -> str:
        if left:
            raise left.pop()
        return "done"

    with caplog.at_level(logging.WARNING, logger="psworker"):
        assert await until_decided(attempt, now() + 60) == "done"
    assert len(caplog.records) == 1
    assert "make room on the disk" in caplog.text
