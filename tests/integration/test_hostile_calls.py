"""Bytes that no honest client sends: refused in words, nothing changed, all goes on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import grpc
import pytest
import torch
from torch import nn

from psserver.host.shard_host import ShardHost
from pswire.error_details import refusal_from_rpc_error
from pswire.frames import (
    REQUEST_CHUNK_FIELD,
    REQUEST_HEADER_FIELD,
    REQUEST_TRAILER_FIELD,
    SEED_CHUNK_FIELD,
    encode_chunk,
    join_fields,
)
from pswire.limits import MESSAGE_BYTES_MAX, PROTOCOL_VERSION
from pswire.placement import Chunk
from pswire.reasons import ErrorReason
from pswire.v1 import (
    coordinator_service_pb2,
    membership_pb2,
    parameter_service_pb2,
    push_pb2,
    schema_pb2,
)
from tests.integration.job import Job, connect, key

DATA: Final = "/pswire.v1.ParameterService/"
CONTROL: Final = "/pswire.v1.CoordinatorService/"
TIMEOUT_S: Final = 10.0
Messages = list[bytes]
RawCall = Callable[..., Iterable[bytes]]


@dataclass
class Target:
    """A running job with one member, and what a forger needs to speak for it."""

    job: Job
    channel: grpc.Channel
    coordinator: grpc.Channel
    step: Callable[[], None]
    own: Chunk = field(init=False)
    other: Chunk = field(init=False)

    def __post_init__(self) -> None:
        host = self.job.shards[0]
        self.own = host.model.chunks[0]
        self.other = self.job.shards[1].model.chunks[0]

    def header(self, **changes: Any) -> bytes:  # noqa: ANN401, fields of a message
        """A header that is right but for the changes."""
        host = self.job.shards[0]
        done = self.job.ask(lambda: host.model.core.clocks.applied_clock)
        values: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "job_id": host.job_id,
            "optimizer": "optimizer",
            "worker": membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1),
            "shard_incarnation": host.incarnation,
            "generation": 1,
            "sequence": done + 1,
            "sequence_unacknowledged_min": done + 1,
            "clock": done + 1,
        }
        values.update(changes)
        header = push_pb2.PushHeader(**values).SerializeToString()
        return join_fields((REQUEST_HEADER_FIELD, header))

    def later(self, count: int) -> bytes:
        """The header of a push that is `count` pushes too far on."""
        done = self.job.ask(lambda: self.job.shards[0].model.core.clocks.applied_clock)
        return self.header(sequence=done + count, clock=done + count)

    def trailer(self, **changes: Any) -> bytes:  # noqa: ANN401, fields of a message
        """A trailer of a push without chunks, right but for the changes."""
        values: dict[str, Any] = {
            "weight": 1.0,
            "groups": [schema_pb2.GroupHyperparameters(values=self.hyperparameters())],
            "finite": True,
            "chunk_bitmap": b"\0",
        }
        values.update(changes)
        trailer = push_pb2.PushTrailer(**values).SerializeToString()
        return join_fields((REQUEST_TRAILER_FIELD, trailer))

    def hyperparameters(self, **changes: float) -> list[float]:
        """Those of the job's one group, but for the changes."""
        spec = self.job.coordinator.core.model.optimizers[0]
        pairs = zip(
            spec.hyperparameter_names, spec.groups[0].hyperparameters, strict=True
        )
        return list({**dict(pairs), **changes}.values())

    def group(self, **changes: float) -> list[schema_pb2.GroupHyperparameters]:
        values = self.hyperparameters(**changes)
        return [schema_pb2.GroupHyperparameters(values=values)]

    def chunk(self, chunk: Chunk, **changes: Any) -> bytes:  # noqa: ANN401
        """A whole chunk of zeros, right but for the changes."""
        values: dict[str, Any] = {
            "index": chunk.index,
            "presence": b"\x01",
            "data": bytes(chunk.byte_count),
        }
        values.update(changes)
        return encode_chunk(REQUEST_CHUNK_FIELD, **values)

    def state(self) -> tuple[object, ...]:
        """All that must not change: values, clocks, and what is kept of pushes."""
        kept = [self.job.ask(partial(_kept, host)) for host in self.job.shards]
        return (self.job.values_digest(), *kept)


def _kept(host: ShardHost) -> tuple[object, ...]:
    core = host.model.core
    window = core.dedupe.window_of(key("w0"))
    # What the next push acknowledges is forgotten, by an honest one and a forged one.
    open_pushes = [
        (sequence, entry.trailer, dict(entry.digests))
        for sequence, entry in window.entries.items()
        if sequence > window.done_sequence and (entry.trailer or entry.digests)
    ]
    return core.clocks.applied_clock, core.clocks.record, open_pushes


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder: Path = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch, Job(folder) as job:
        # A forged seed is held until its fence could have come.
        patch.setattr("psserver.rpc.parameter_service.WAITING_INTERVAL_MS", 100)
        with connect(job, "w0") as ps:
            model = nn.ParameterList([torch.ones(1024), torch.ones(1024)])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = ps.prepare(model, optimizer)

            def step() -> None:
                before = [each.detach().clone() for each in model.parameters()]
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                for old, new in zip(before, model.parameters(), strict=True):
                    torch.testing.assert_close(new.detach(), old - 0.1)

            step()
            with (
                grpc.insecure_channel(job.shard_addresses()[0]) as channel,
                grpc.insecure_channel(job.address) as coordinator,
            ):
                yield Target(job, channel, coordinator, step)


def streamed(channel: grpc.Channel, method: str) -> RawCall:
    """A method with a stream of raw bytes each way, whatever the method's own kind."""
    return cast("RawCall", channel.stream_stream(DATA + method, None, None))


def asked(channel: grpc.Channel, method: str) -> RawCall:
    """A method that takes raw bytes."""
    return cast("RawCall", channel.unary_stream(CONTROL + method, None, None))


def refusal_of(call: Iterable[object]) -> tuple[grpc.StatusCode, str, object]:
    """How a call ends: status, text and our reason."""
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    error: Any = caught.value
    refusal = refusal_from_rpc_error(error)
    return error.code(), error.details(), refusal and refusal.reason


def assert_readable(text: str) -> None:
    assert "Traceback" not in text
    assert 'File "' not in text
    assert "object at 0x" not in text
    assert 0 < len(text) < 2000


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
    "weight NaN": (
        ErrorReason.MALFORMED_MESSAGE,
        "weight nan",
        lambda t: [t.header(), t.trailer(weight=float("nan"))],
    ),
    "weight infinite": (
        ErrorReason.MALFORMED_MESSAGE,
        "weight inf",
        lambda t: [t.header(), t.trailer(weight=float("inf"))],
    ),
    "weight negative": (
        ErrorReason.MALFORMED_MESSAGE,
        "weight -1",
        lambda t: [t.header(), t.trailer(weight=-1.0)],
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
        "parts",
        lambda t: [t.header(), t.chunk(t.own, part=1)],
    ),
    "not the last part": (
        ErrorReason.UNSUPPORTED,
        "parts",
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
    reason, fragment, make = PUSHES[case]
    before = target.state()
    call = streamed(target.channel, method)

    code, text, found = refusal_of(call(iter(make(target)), timeout=TIMEOUT_S))

    assert found == reason, (code, text)
    assert fragment in text
    assert_readable(text)
    assert target.state() == before


def test_training_goes_on_after_every_forged_push(target: Target) -> None:
    call = streamed(target.channel, "PushPull")
    for _, _, make in PUSHES.values():
        refusal_of(call(iter(make(target)), timeout=TIMEOUT_S))
        target.step()


def test_a_message_above_the_limit_is_refused_by_grpc(target: Target) -> None:
    before = target.state()
    call = streamed(target.channel, "PushPull")
    large = [target.header(), bytes(MESSAGE_BYTES_MAX + 1)]
    code, text, _ = refusal_of(call(iter(large), timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, text
    assert target.state() == before
    target.step()


def test_an_unknown_method_is_refused_by_grpc(target: Target) -> None:
    call = streamed(target.channel, "Overwrite")
    code, _, _ = refusal_of(call(iter([b""]), timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.UNIMPLEMENTED


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


def entry(**changes: Any) -> schema_pb2.SchemaEntry:  # noqa: ANN401, fields of a message
    values: dict[str, Any] = {
        "model": "model",
        "name": "0",
        "shape": [1024],
        "element_type": schema_pb2.ELEMENT_TYPE_FLOAT32,
        "kind": schema_pb2.ENTRY_KIND_PARAMETER,
        "trainable": True,
    }
    values.update(changes)
    return schema_pb2.SchemaEntry(**values)


def optimizer(class_name: str = "SGD", *indexes: int) -> schema_pb2.OptimizerSpec:
    return schema_pb2.OptimizerSpec(
        name="optimizer",
        class_name=class_name,
        hyperparameter_names=["lr"],
        groups=[
            schema_pb2.ParameterGroup(
                entry_indexes=indexes,
                hyperparameters=schema_pb2.GroupHyperparameters(values=[0.1]),
            )
        ],
    )


JOINS: Final[dict[str, tuple[str, list[Any], list[Any]]]] = {
    "no schema": ("INVALID_ARGUMENT FAILED_PRECONDITION", [], []),
    "a product beyond 64 bits": (
        "RESOURCE_EXHAUSTED",
        [entry(shape=[4194305, 4194305, 211106198978564])],
        [],
    ),
    "a negative size": ("INVALID_ARGUMENT", [entry(shape=[-1])], []),
    "an unknown type": ("INVALID_ARGUMENT", [entry(element_type=77)], []),
    "an unknown kind": ("INVALID_ARGUMENT", [entry(kind=77)], []),
    "a name twice": ("INVALID_ARGUMENT", [entry(), entry()], []),
    "an empty name": ("INVALID_ARGUMENT", [entry(name="")], []),
    "a long name": ("INVALID_ARGUMENT", [entry(name="x" * 1025)], []),
    "65 dimensions": ("RESOURCE_EXHAUSTED", [entry(shape=[1] * 65)], []),
    "a pickle for an optimizer": (
        "INVALID_ARGUMENT",
        [entry()],
        [optimizer("os.system", 0)],
    ),
    "an optimizer of no tensor": (
        "INVALID_ARGUMENT",
        [entry()],
        [optimizer("SGD", 5)],
    ),
    "a negative tensor": ("INVALID_ARGUMENT", [entry()], [optimizer("SGD", -1)]),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("case", JOINS)
def test_a_forged_join_is_refused(
    target: Target, tmp_path: Path, case: str, is_first: bool
) -> None:
    """A job that has no model yet must not take its model from such a worker."""
    codes, entries, optimizers = JOINS[case]
    if not is_first:
        before = target.state()
        _, text = forged_join(target.coordinator, entries, optimizers)
        assert_readable(text)
        assert target.state() == before
        target.step()
        return
    with (
        Job(tmp_path, shard_count=1) as job,
        grpc.insecure_channel(job.address) as channel,
    ):
        code, text = forged_join(channel, entries, optimizers)
        assert code.name in codes.split(), text
        assert_readable(text)
        assert job.ask(lambda: job.coordinator.core.model.schema) is None


def forged_join(
    channel: grpc.Channel, entries: list[Any], optimizers: list[Any]
) -> tuple[grpc.StatusCode, str]:
    register = asked(channel, "RegisterWorker")
    request = coordinator_service_pb2.RegisterWorkerRequest(
        protocol_version=PROTOCOL_VERSION, process_id=f"forger-{id(entries)}"
    )
    (answer,) = register(request.SerializeToString(), timeout=TIMEOUT_S)
    registered = coordinator_service_pb2.RegisterWorkerResponse.FromString(answer)
    join = asked(channel, "Join")
    forged = coordinator_service_pb2.JoinRequest(
        job_id=registered.settings.job_id,
        worker=registered.worker,
        schema=schema_pb2.ModelSchema(entries=entries),
        optimizers=optimizers,
    )
    code, text, _ = refusal_of(join(forged.SerializeToString(), timeout=TIMEOUT_S))
    return code, text


@pytest.mark.parametrize(
    "method",
    ["RegisterWorker", "RegisterShard", "Join", "Leave", "ReportFence", "LeaseData"],
)
def test_garbage_to_the_coordinator_is_refused(target: Target, method: str) -> None:
    before = target.state()
    call = asked(target.coordinator, method)
    _, text, reason = refusal_of(call(b"\xff" * 64, timeout=TIMEOUT_S))
    assert reason == ErrorReason.MALFORMED_MESSAGE, text
    assert_readable(text)
    assert target.state() == before
    target.step()


def test_a_worker_names_no_more_loaders_than_it_can_use(target: Target) -> None:
    forged = coordinator_service_pb2.JoinRequest(
        job_id=target.job.shards[0].job_id,
        worker=membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1),
        loaders=[f"loader {number}" for number in range(257)],
    )
    join = asked(target.coordinator, "Join")
    _, text, reason = refusal_of(join(forged.SerializeToString(), timeout=TIMEOUT_S))
    assert reason == ErrorReason.LIMIT_EXCEEDED
    assert "257 loaders" in text
