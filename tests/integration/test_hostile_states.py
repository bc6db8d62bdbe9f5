"""Optimizer state that no honest client sends or asks for: refused, nothing changed."""

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from pswire.limits import PROTOCOL_VERSION
from pswire.optimizer_states import StateKey, encode_state
from pswire.reasons import ErrorReason
from pswire.v1 import membership_pb2, parameter_service_pb2, push_pb2
from tests.integration.forged_calls import (
    TIMEOUT_S,
    Messages,
    Target,
    assert_readable,
    refusal_of,
    streamed,
)

WORKER: Final = membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1)


def header(t: Target, **changes: Any) -> bytes:  # noqa: ANN401, fields of a message
    """A header that is right but for the changes."""
    host = t.job.shards[0]
    done = t.job.ask(lambda: host.model.core.clocks.applied_clock)
    values: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "job_id": host.job_id,
        "worker": WORKER,
        "shard_incarnation": host.incarnation,
        "generation": 1,
        "sequence": done + 1,
        "optimizer": "optimizer",
    }
    values.update(changes)
    found = parameter_service_pb2.StageOptimizerStateHeader(**values)
    message = parameter_service_pb2.StageOptimizerStateRequest(header=found)
    return message.SerializeToString()


def part(
    t: Target,
    state: dict[tuple[int, int, str], torch.Tensor] | bytes,
    **changes: Any,  # noqa: ANN401, fields of a message
) -> bytes:
    """A part of the state of a chunk that the shard has."""
    if not isinstance(state, bytes):
        (state,) = encode_state({StateKey(*key): v for key, v in state.items()})
    values = {"chunk_index": t.own.index, "optimizer": "optimizer", "tensors": state}
    found = push_pb2.OptimizerStatePart(**{**values, **changes})
    message = parameter_service_pb2.StageOptimizerStateRequest(part=found)
    return message.SerializeToString()


def momentum(count: int, dtype: torch.dtype = torch.float32) -> dict[Any, torch.Tensor]:
    return {(0, 1, "momentum_buffer"): torch.zeros(count, dtype=dtype)}


STATES: Final[dict[str, tuple[ErrorReason, str, Callable[[Target], Messages]]]] = {
    "nothing": (ErrorReason.MALFORMED_MESSAGE, "no header", lambda t: []),
    "garbage": (ErrorReason.MALFORMED_MESSAGE, "parsed", lambda t: [b"\xff" * 64]),
    "a part before the header": (
        ErrorReason.MALFORMED_MESSAGE,
        "before a header",
        lambda t: [part(t, momentum(1))],
    ),
    "another optimizer": (
        ErrorReason.OPTIMIZER_MISMATCH,
        "the job has no optimizer",
        lambda t: [header(t, optimizer="x")],
    ),
    "a part of another optimizer": (
        ErrorReason.MALFORMED_MESSAGE,
        "names it",
        lambda t: [header(t), part(t, momentum(1), optimizer="x")],
    ),
    "another worker": (
        ErrorReason.WORKER_INCARNATION_STALE,
        "only members",
        lambda t: [
            header(
                t, worker=membership_pb2.WorkerIdentity(worker_id="w9", incarnation=1)
            )
        ],
    ),
    "a later push": (
        ErrorReason.SEQUENCE_GAP,
        "the next is",
        lambda t: [header(t, sequence=999)],
    ),
    "no safetensors": (
        ErrorReason.MALFORMED_MESSAGE,
        "can't be read",
        lambda t: [header(t), part(t, b"\xff" * 64)],
    ),
    "a pickle": (
        ErrorReason.MALFORMED_MESSAGE,
        "can't be read",
        lambda t: [header(t), part(t, b"\x80\x04K\x01.")],
    ),
    "a name without slices": (
        ErrorReason.MALFORMED_MESSAGE,
        "can't be read",
        lambda t: [header(t), part(t, {(1, 1, "step"): torch.tensor(0.0)})],
    ),
    "another shard's chunk": (
        ErrorReason.CHUNK_INVALID,
        "is not one of shard 0",
        lambda t: [header(t), part(t, momentum(1), chunk_index=t.other.index)],
    ),
    "too few elements": (
        ErrorReason.CHUNK_INVALID,
        "has shape [1]",
        lambda t: [header(t), part(t, momentum(1))],
    ),
    "whole numbers": (
        ErrorReason.CHUNK_INVALID,
        "torch.int64",
        lambda t: [header(t), part(t, momentum(t.own.element_count, torch.int64))],
    ),
    "a count that is no number": (
        ErrorReason.CHUNK_INVALID,
        "'step' is nan, which is not a count of steps",
        lambda t: [header(t), part(t, {(0, 1, "step"): torch.tensor(math.nan)})],
    ),
    "a count without end": (
        ErrorReason.CHUNK_INVALID,
        "'step' is inf, which is not a count of steps",
        lambda t: [header(t), part(t, {(0, 1, "step"): torch.tensor(math.inf)})],
    ),
    "a count below 0": (
        ErrorReason.CHUNK_INVALID,
        "'step' is -1.0, which is not a count of steps",
        lambda t: [header(t), part(t, {(0, 1, "step"): torch.tensor(-1.0)})],
    ),
    "a product of momenta that is none": (
        ErrorReason.CHUNK_INVALID,
        "'mu_product' is nan, which is not in 0 to 1",
        lambda t: [header(t), part(t, {(0, 1, "mu_product"): torch.tensor(math.nan)})],
    ),
    "slices that are none": (
        ErrorReason.CHUNK_INVALID,
        "beyond",
        lambda t: [header(t), part(t, {(7, 9, "step"): torch.tensor(1.0)})],
    ),
    "state of another class": (
        ErrorReason.HYPERPARAMETER_INVALID,
        "is SGD and goes on from nothing, but its state holds exp_avg",
        lambda t: [
            header(t),
            part(t, {(0, 1, "exp_avg"): torch.zeros(t.own.element_count)}),
        ],
    ),
    "more bytes than there can be": (
        ErrorReason.LIMIT_EXCEEDED,
        "which no optimizer has",
        lambda t: [header(t), part(t, b"\0" * (1 << 20))],
    ),
    "more parts than there can be": (
        ErrorReason.LIMIT_EXCEEDED,
        "more than 16 parts",
        lambda t: [header(t), *[part(t, momentum(t.own.element_count))] * 17],
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_forged_state_changes_nothing(target: Target, case: str) -> None:
    reason, fragment, make = STATES[case]
    before = target.state()
    call = streamed(target.channel, "StageOptimizerState")

    code, text, found = refusal_of(call(iter(make(target)), timeout=TIMEOUT_S))

    assert found == reason, (code, text)
    assert fragment in text
    assert_readable(text)
    assert target.state() == before
    target.step()


def test_a_push_that_loads_what_is_not_staged_is_held_off(target: Target) -> None:
    before = target.state()
    call = streamed(target.channel, "PushPull")
    request = target.header() + target.trailer(loads_state=True)

    _, text, found = refusal_of(call(iter([request]), timeout=TIMEOUT_S))

    assert found == ErrorReason.RECOVERING
    assert "none is staged for it" in text
    assert target.state() == before
    target.step()


PULLS: Final[dict[str, tuple[ErrorReason, dict[str, Any]]]] = {
    "another optimizer": (ErrorReason.OPTIMIZER_MISMATCH, {"optimizer": "x"}),
    "another job": (ErrorReason.JOB_UNKNOWN, {"job_id": "x"}),
    "no clock": (ErrorReason.MALFORMED_MESSAGE, {"clock": -1}),
    "no member": (
        ErrorReason.WORKER_INCARNATION_STALE,
        {"worker": membership_pb2.WorkerIdentity(worker_id="w9", incarnation=1)},
    ),
}


@pytest.mark.parametrize("case", PULLS)
def test_state_is_for_members_only(target: Target, case: str) -> None:
    reason, changes = PULLS[case]
    host = target.job.shards[0]
    request = parameter_service_pb2.PullOptimizerStateRequest(
        **{
            "protocol_version": PROTOCOL_VERSION,
            "job_id": host.job_id,
            "worker": WORKER,
            "shard_incarnation": host.incarnation,
            "generation": 1,
            "optimizer": "optimizer",
            **changes,
        }
    )
    call = streamed(target.channel, "PullOptimizerState")

    _, text, found = refusal_of(
        call(iter([request.SerializeToString()]), timeout=TIMEOUT_S)
    )

    assert found == reason, text
    assert_readable(text)


def test_a_push_by_an_unknown_declaration_is_held_and_then_sent_away(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psserver.shard.rpc.readiness.WAITING_INTERVAL_MS", 100)
    before = target.state()
    call = streamed(target.channel, "PushPull")
    request = target.header() + target.trailer(optimizer_digest="0" * 32)

    _, text, found = refusal_of(call(iter([request]), timeout=TIMEOUT_S))

    assert found == ErrorReason.RECOVERING
    assert "waits for the coordinator to send the parameter groups" in text
    assert target.state() == before
    target.step()
