"""The catalogue of errors is whole, and the wire knows the same reasons."""

import grpc
import pytest

from pswire.error_details import DECIDED_CODES, is_decided, status_code
from pswire.reasons import CATALOGUE, ErrorReason, Refusal
from pswire.v1 import error_pb2

every_reason = pytest.mark.parametrize("reason", ErrorReason)


def test_reasons_are_those_of_the_proto() -> None:
    prefix = "ERROR_REASON_"
    assert {reason.name: int(reason) for reason in ErrorReason} == {
        name.removeprefix(prefix): number
        for name, number in error_pb2.ErrorReason.items()
        if number != error_pb2.ERROR_REASON_UNSPECIFIED
    }


def test_every_reason_has_a_case() -> None:
    assert set(CATALOGUE) == set(ErrorReason)


@every_reason
def test_every_status_is_an_error_of_grpc(reason: ErrorReason) -> None:
    assert status_code(reason) not in {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,  # the caller's own doing
        grpc.StatusCode.UNKNOWN,  # what gRPC says of an exception nobody caught
    }


@every_reason
def test_every_cure_ends_a_sentence_about_what_happened(reason: ErrorReason) -> None:
    cure = CATALOGUE[reason].cure

    assert cure[0].islower()
    assert not cure.endswith(".")
    assert Refusal(reason, "it happened").text == f"it happened; {cure}"


def test_a_cause_has_a_cure_of_its_own_where_that_of_the_reason_does_not_fit() -> None:
    refusal = Refusal(ErrorReason.SCHEMA_MISMATCH, "it happened", cure="do this")

    assert refusal.text == "it happened; do this"


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_codes_that_grpc_makes_up_leave_the_outcome_unknown(
    code: grpc.StatusCode,
) -> None:
    made_up = {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
    }
    assert is_decided(code) is (code not in made_up)
    assert is_decided(code) is (code in DECIDED_CODES)


@pytest.mark.parametrize(
    "reason", [ErrorReason.UNAUTHENTICATED, ErrorReason.PERMISSION_DENIED]
)
def test_a_server_that_says_who_may_call_has_decided(reason: ErrorReason) -> None:
    refusal = Refusal(reason, "it happened")

    assert is_decided(status_code(reason), refusal)


def test_a_call_whose_credential_has_ended_may_have_done_something() -> None:
    refusal = Refusal(ErrorReason.CREDENTIAL_ENDED, "it happened")

    assert not is_decided(status_code(refusal.reason), refusal)


def test_facts_are_text() -> None:
    refusal = Refusal(ErrorReason.SEQUENCE_GAP, "gap", sequence=5, worker_id="w0")

    assert refusal.facts == {"sequence": "5", "worker_id": "w0"}
    assert str(refusal) == "gap"
