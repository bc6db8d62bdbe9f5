"""Bytes that no honest client sends: refused in words, nothing changed, all goes on."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest

from pswire.frames import (
    REQUEST_HEADER_FIELD,
    SEED_CHUNK_FIELD,
    encode_chunk,
    join_fields,
)
from pswire.limits import PROTOCOL_VERSION
from pswire.reasons import ErrorReason
from pswire.v1 import (
    membership_pb2,
    parameter_service_pb2,
    push_pb2,
    schema_pb2,
)
from tests.integration.forged_calls import (
    TIMEOUT_S,
    Messages,
    Target,
    assert_readable,
    check_goes_on,
    check_refused,
    refusal_of,
    streamed,
)


def _with_trailer(field: str, value: float, target: Target) -> Messages:
    return [target.header(), target.trailer(**{field: value})]


PUSHES: Final[dict[str, tuple[ErrorReason, str, Callable[[Target], Messages]]]] = {
    "nothing": (ErrorReason.MALFORMED_MESSAGE, "empty", lambda t: []),
    "an empty message": (ErrorReason.MALFORMED_MESSAGE, "header", lambda t: [b""]),
    "garbage": (ErrorReason.MALFORMED_MESSAGE, "", lambda t: [b"\xff" * 64]),
    "a length beyond the end": (
        ErrorReason.MALFORMED_MESSAGE,
        "",
        lambda t: [b"\x0a\xff\xff\xff\xff\x07"],
    ),
    "garbage after a header": (
        ErrorReason.MALFORMED_MESSAGE,
        "",
        lambda t: [t.header(), b"\x1a\x05\xff\xff\xff\xff\xff"],
    ),
    "no header": (ErrorReason.MALFORMED_MESSAGE, "header", lambda t: [t.trailer()]),
    "another job": (
        ErrorReason.JOB_UNKNOWN,
        "job 'x\\n<b>' is not served",
        lambda t: [t.header(job_id="x\n<b>")],
    ),
    "another protocol version": (
        ErrorReason.PROTOCOL_VERSION,
        f"this server speaks {PROTOCOL_VERSION}",
        lambda t: [t.header(protocol_version=99)],
    ),
    "another start of the shard": (
        ErrorReason.SHARD_INCARNATION_STALE,
        "the call is for 7",
        lambda t: [t.header(shard_incarnation=7)],
    ),
    "an unknown worker": (
        ErrorReason.WORKER_INCARNATION_STALE,
        "mallory/1 is not a member",
        lambda t: [
            t.header(
                worker=membership_pb2.WorkerIdentity(worker_id="mallory", incarnation=1)
            )
        ],
    ),
    "another start of a worker": (
        ErrorReason.WORKER_INCARNATION_STALE,
        "w0/2 is not a member",
        lambda t: [
            t.header(
                worker=membership_pb2.WorkerIdentity(worker_id="w0", incarnation=2)
            )
        ],
    ),
    "no worker": (
        ErrorReason.MALFORMED_MESSAGE,
        "no identity",
        lambda t: [t.header(worker=membership_pb2.WorkerIdentity())],
    ),
    "sequence 0": (
        ErrorReason.MALFORMED_MESSAGE,
        "sequence 0",
        lambda t: [t.header(sequence=0, clock=0)],
    ),
    "a negative sequence": (
        ErrorReason.MALFORMED_MESSAGE,
        "sequence -1",
        lambda t: [t.header(sequence=-1, clock=-1)],
    ),
    "sequence above 2^62": (
        ErrorReason.MALFORMED_MESSAGE,
        "2^62",
        lambda t: [t.header(sequence=(1 << 62) + 1, clock=(1 << 62) + 1)],
    ),
    "sequence 2^62": (
        ErrorReason.SEQUENCE_GAP,
        "",
        lambda t: [t.header(sequence=1 << 62, clock=1 << 62)],
    ),
    "answers that are never acknowledged": (
        ErrorReason.LIMIT_EXCEEDED,
        "unacknowledged",
        lambda t: [t.header(sequence_unacknowledged_min=-64)],
    ),
    "more data ranges than a push can have": (
        ErrorReason.LIMIT_EXCEEDED,
        "65537 data ranges",
        lambda t: [t.header() + t.trailer(ranges=[push_pb2.DataRange()] * 65_537)],
    ),
    "a gap in sequences": (ErrorReason.SEQUENCE_GAP, "", lambda t: [t.later(3)]),
    "another clock": (
        ErrorReason.MALFORMED_MESSAGE,
        "the header says 999",
        lambda t: [t.header(clock=999)],
    ),
    "an unknown optimizer": (
        ErrorReason.OPTIMIZER_MISMATCH,
        "no optimizer 'sgd; DROP'",
        lambda t: [t.header(optimizer="sgd; DROP"), t.trailer()],
    ),
    **{
        f"{name} {value}": (
            ErrorReason.MALFORMED_MESSAGE,
            f"{name.replace('_', ' ')} {value} is not",
            partial(_with_trailer, name, value),
        )
        for name in ("weight", "loss_scale")
        for value in (math.nan, math.inf, -1.0)
    },
    "weight of which two have no sum": (
        ErrorReason.MALFORMED_MESSAGE,
        "weight 1e+308 is not in 0 to 1e+18: push with the number of samples",
        partial(_with_trailer, "weight", 1e308),
    ),
    "more schedulers than there are": (
        ErrorReason.LIMIT_EXCEEDED,
        "257 schedulers of one optimizer, the limit is 256",
        lambda t: [t.header(), t.trailer(scheduler_steps=[1] * 257)],
    ),
    "gradient norm negative": (
        ErrorReason.MALFORMED_MESSAGE,
        "gradient norm -1.0 is not in 0 to 1e+18",
        lambda t: [t.header(), t.trailer(gradient_norm=-1.0)],
    ),
    "lr NaN": (
        ErrorReason.HYPERPARAMETER_INVALID,
        "lr",
        lambda t: [t.header(), t.trailer(groups=t.group(lr=float("nan")))],
    ),
    "lr negative": (
        ErrorReason.HYPERPARAMETER_INVALID,
        "lr",
        lambda t: [t.header(), t.trailer(groups=t.group(lr=-0.5))],
    ),
    "no groups": (
        ErrorReason.OPTIMIZER_MISMATCH,
        "1 parameter groups, the push names 0",
        lambda t: [t.header(), t.trailer(groups=[])],
    ),
    "a group without values": (
        ErrorReason.HYPERPARAMETER_INVALID,
        "",
        lambda t: [
            t.header(),
            t.trailer(groups=[schema_pb2.GroupHyperparameters()]),
        ],
    ),
    "a bitmap of another size": (
        ErrorReason.MALFORMED_MESSAGE,
        "",
        lambda t: [t.header(), t.trailer(chunk_bitmap=bytes(9))],
    ),
    "a data range backwards": (
        ErrorReason.MALFORMED_MESSAGE,
        "data range [5, 2)",
        lambda t: [
            t.header(),
            t.trailer(
                ranges=[push_pb2.DataRange(loader="l", epoch=0, start=5, stop=2)]
            ),
        ],
    ),
    "a chunk of another shard": (
        ErrorReason.CHUNK_INVALID,
        "",
        lambda t: [t.header(), t.chunk(t.other)],
    ),
    "a chunk that does not exist": (
        ErrorReason.CHUNK_INVALID,
        "4294967295",
        lambda t: [t.header(), t.chunk(t.own, index=0xFFFFFFFF)],
    ),
    "too few bytes": (
        ErrorReason.CHUNK_INVALID,
        "take 4096 bytes, 8 came",
        lambda t: [t.header(), t.chunk(t.own, data=bytes(8))],
    ),
    "too many bytes": (
        ErrorReason.CHUNK_INVALID,
        "take 4096 bytes, 8192 came",
        lambda t: [t.header(), t.chunk(t.own, data=bytes(8192))],
    ),
    "another digest": (
        ErrorReason.CHUNK_DIGEST_MISMATCH,
        "",
        lambda t: [t.header(), t.chunk(t.own, digest=12345)],
    ),
    "presence bits too many": (
        ErrorReason.MALFORMED_MESSAGE,
        "",
        lambda t: [t.header(), t.chunk(t.own, presence=b"\x01\x00")],
    ),
    "presence bits beyond the last": (
        ErrorReason.MALFORMED_MESSAGE,
        "",
        lambda t: [t.header(), t.chunk(t.own, presence=b"\xff")],
    ),
    "a second part": (
        ErrorReason.UNSUPPORTED,
        "a gradient's chunk goes in one message",
        lambda t: [t.header(), t.chunk(t.own, part=1)],
    ),
    "not the last part": (
        ErrorReason.UNSUPPORTED,
        "a gradient's chunk goes in one message",
        lambda t: [t.header(), t.chunk(t.own, last=False)],
    ),
    "an unknown encoding": (
        ErrorReason.MALFORMED_MESSAGE,
        "encoding 77",
        lambda t: [t.header(), t.chunk(t.own, encoding=77)],
    ),
}


@pytest.mark.parametrize("method", ["PushPull", "Push"])
@pytest.mark.parametrize("case", PUSHES)
def test_a_forged_push_changes_nothing(target: Target, case: str, method: str) -> None:
    check_refused(target, method, PUSHES[case])


def test_training_goes_on_after_every_forged_push(target: Target) -> None:
    check_goes_on(target, PUSHES.values())


SEEDS: Final[dict[str, tuple[ErrorReason, Callable[[Target], Messages]]]] = {
    "garbage": (ErrorReason.MALFORMED_MESSAGE, lambda t: [b"\xff" * 64]),
    "no header": (
        ErrorReason.MALFORMED_MESSAGE,
        lambda t: [
            encode_chunk(SEED_CHUNK_FIELD, index=0, presence=b"\x01", data=bytes(4096))
        ],
    ),
    "a member after the start": (
        ErrorReason.WORKER_INCARNATION_STALE,
        lambda t: [
            join_fields(
                (
                    REQUEST_HEADER_FIELD,
                    parameter_service_pb2.SeedHeader(
                        protocol_version=PROTOCOL_VERSION,
                        job_id=t.job.shards[0].job_id,
                        worker=membership_pb2.WorkerIdentity(
                            worker_id="w0", incarnation=1
                        ),
                        shard_incarnation=1,
                        fence_number=1,
                    ).SerializeToString(),
                )
            ),
            encode_chunk(
                SEED_CHUNK_FIELD,
                index=t.own.index,
                presence=b"\x01",
                data=bytes(t.own.byte_count),
            ),
        ],
    ),
}


@pytest.mark.parametrize("case", SEEDS)
def test_a_forged_seed_changes_nothing(target: Target, case: str) -> None:
    reason, make = SEEDS[case]
    before = target.state()
    call = streamed(target.channel, "Seed")

    code, text, found = refusal_of(call(iter(make(target)), timeout=TIMEOUT_S))

    assert found == reason, (code, text)
    assert_readable(text)
    assert target.state() == before
    target.step()


def _choice(*workers: tuple[str, int], clock: int = 2) -> membership_pb2.ClockChoice:
    return membership_pb2.ClockChoice(
        clock=clock,
        workers=[
            membership_pb2.WorkerIdentity(worker_id=name, incarnation=incarnation)
            for name, incarnation in workers
        ],
    )


OWN: Final = ("w0", 1)

CALLS: Final[dict[str, tuple[str, ErrorReason, str, dict[str, Any]]]] = {
    "a commit of another job": (
        "Commit",
        ErrorReason.JOB_UNKNOWN,
        "not served",
        {"job_id": "x", "choice": _choice(OWN)},
    ),
    "a commit for another start of the shard": (
        "Commit",
        ErrorReason.SHARD_INCARNATION_STALE,
        "the call is for 7",
        {"shard_incarnation": 7, "choice": _choice(OWN)},
    ),
    "a commit in another protocol version": (
        "Commit",
        ErrorReason.PROTOCOL_VERSION,
        "",
        {"protocol_version": 99, "choice": _choice(OWN)},
    ),
    "a commit without a choice": (
        "Commit",
        ErrorReason.MALFORMED_MESSAGE,
        "0 contributors",
        {},
    ),
    "a commit of nobody": (
        "Commit",
        ErrorReason.MALFORMED_MESSAGE,
        "no identity",
        {"choice": _choice(("", 0))},
    ),
    "a commit of one twice": (
        "Commit",
        ErrorReason.MALFORMED_MESSAGE,
        "not all different",
        {"choice": _choice(OWN, OWN)},
    ),
    "a commit out of order": (
        "Commit",
        ErrorReason.MALFORMED_MESSAGE,
        "not in the order",
        {"choice": _choice(("w1", 1), OWN)},
    ),
    "a commit of clock -1": (
        "Commit",
        ErrorReason.MALFORMED_MESSAGE,
        "clock -1",
        {"choice": _choice(OWN, clock=-1)},
    ),
    "a commit where steps have one phase": (
        "Commit",
        ErrorReason.MALFORMED_MESSAGE,
        "one phase",
        {"choice": _choice(OWN, clock=1_000_000)},
    ),
    "ready for another start of the shard": (
        "Ready",
        ErrorReason.SHARD_INCARNATION_STALE,
        "",
        {"shard_incarnation": 7, "sequence": 2, "clock": 2},
    ),
    "ready for push 0": (
        "Ready",
        ErrorReason.MALFORMED_MESSAGE,
        "sequence 0",
        {"sequence": 0},
    ),
    "idle for push -1": (
        "AwaitContribution",
        ErrorReason.MALFORMED_MESSAGE,
        "sequence -1",
        {"sequence": -1},
    ),
    "idle as an unknown worker": (
        "AwaitContribution",
        ErrorReason.WORKER_INCARNATION_STALE,
        "w9/1 is not a member",
        {
            "sequence": 2,
            "worker": membership_pb2.WorkerIdentity(worker_id="w9", incarnation=1),
        },
    ),
    "a pull at clock -5": (
        "Pull",
        ErrorReason.MALFORMED_MESSAGE,
        "clock -5",
        {"clock": -5},
    ),
    "a pull as another start of a worker": (
        "Pull",
        ErrorReason.WORKER_INCARNATION_STALE,
        "w0/2 is no member",
        {"worker": membership_pb2.WorkerIdentity(worker_id="w0", incarnation=2)},
    ),
    "a session of nobody": (
        "GetSession",
        ErrorReason.MALFORMED_MESSAGE,
        "no identity",
        {"worker": membership_pb2.WorkerIdentity()},
    ),
}


def _forged(target: Target, method: str, changes: dict[str, Any]) -> Iterator[bytes]:
    """A request that is right but for the changes."""
    kind = getattr(parameter_service_pb2, f"{method}Request")
    host = target.job.shards[0]
    values: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "job_id": host.job_id,
        "worker": membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1),
        "shard_incarnation": host.incarnation,
        "generation": 1,
    }
    if method == "GetSession":
        del values["generation"]
    return iter([kind(**{**values, **changes}).SerializeToString()])


@pytest.mark.parametrize("case", CALLS)
def test_a_forged_call_changes_nothing(target: Target, case: str) -> None:
    method, reason, fragment, changes = CALLS[case]
    before = target.state()
    call = streamed(target.channel, method)

    request = _forged(target, method, changes)
    code, text, found = refusal_of(call(request, timeout=TIMEOUT_S))

    assert found == reason, (code, text)
    assert fragment in text
    assert_readable(text)
    assert target.state() == before
    target.step()
