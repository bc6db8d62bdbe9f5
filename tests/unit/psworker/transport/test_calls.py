from pathlib import Path

import grpc
import grpc.aio
import pytest

from pswire.error_details import details_text, status_code, trailing_metadata
from pswire.reasons import ErrorReason, Refusal
from pswire.security.credentials import Credentials
from pswire.security.tokens import new_token
from psworker.errors import (
    AuthenticationError,
    LimitError,
    ShardLostError,
    UnavailableError,
)
from psworker.transport.calls import CallError, translated
from tests.doubles.job_tokens import write_private


def failed(
    code: grpc.StatusCode, text: str, refusal: Refusal | None = None
) -> CallError:
    metadata = grpc.aio.Metadata(*(trailing_metadata(refusal) if refusal else ()))
    with pytest.raises(CallError) as caught, translated("shard 1 at h:1"):
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, text)
    return caught.value


def test_a_refusal_is_decided_and_keeps_its_reason() -> None:
    refusal = Refusal(ErrorReason.SHARD_LOST, "the job has failed")

    error = failed(status_code(refusal.reason), details_text(refusal), refusal)

    assert error.is_decided
    assert not error.is_retryable
    assert isinstance(error.to_ps_error(), ShardLostError)


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    ],
)
def test_what_grpc_makes_up_leaves_the_outcome_unknown(code: grpc.StatusCode) -> None:
    error = failed(code, "socket closed")

    assert not error.is_decided
    assert error.is_retryable
    assert isinstance(error.to_ps_error(), UnavailableError)
    assert "shard 1 at h:1" in str(error.to_ps_error())


def test_a_shard_that_recovers_is_asked_again() -> None:
    refusal = Refusal(ErrorReason.RECOVERING, "no record yet")

    assert failed(status_code(refusal.reason), "", refusal).is_retryable


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED]
)
def test_what_asking_again_can_not_change_is_not_asked_again(
    code: grpc.StatusCode,
) -> None:
    assert not failed(code, "").is_retryable


def test_a_message_beyond_the_limit_is_a_limit_error() -> None:
    error = failed(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CLIENT: Sent message larger than max (5000000 vs. 4194304)",
    )

    assert not error.is_retryable
    shown = error.to_ps_error()
    assert isinstance(shown, LimitError)
    assert "a model or an optimizer is smaller for fewer tensors" in str(shown)


def test_an_answer_that_can_not_be_read_is_a_failed_call() -> None:
    with pytest.raises(CallError) as caught, translated("shard 0"):
        raise Refusal(ErrorReason.MALFORMED_MESSAGE, "ended without a reply")

    assert not caught.value.is_retryable
    assert not caught.value.is_decided


def test_a_call_that_was_refused_for_a_token_replaced_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the one that shows the new token is not."""
    path = write_private(tmp_path / "token", new_token().encode())
    monkeypatch.setenv("PS_TOKEN_FILE", str(path))
    Credentials.from_environment()
    refusal = Refusal(ErrorReason.UNAUTHENTICATED, "missing or invalid credential")
    metadata = grpc.aio.Metadata(*trailing_metadata(refusal))
    unknown = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAUTHENTICATED, grpc.aio.Metadata(), metadata, refusal.text
    )

    def fail_while_replaced() -> None:
        write_private(path, new_token().encode())
        raise unknown

    with pytest.raises(CallError) as caught, translated("shard 1 at h:1"):
        fail_while_replaced()
    assert caught.value.is_retryable
    assert not caught.value.is_decided

    with pytest.raises(CallError) as caught, translated("shard 1 at h:1"):
        raise unknown
    assert not caught.value.is_retryable
    assert caught.value.is_decided
    assert isinstance(caught.value.to_ps_error(), AuthenticationError)
