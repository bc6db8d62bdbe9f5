"""Whatever bytes come, each call is refused by a reason or does what it says.

Messages of every method, cut, overwritten, added to and thinned out, go through all
that stands between gRPC and the core. No answer is INTERNAL or UNKNOWN: those are bugs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from psserver.coordinator.daemon import coordinator_handler
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge.coordinator_settings import CoordinatorSettings
from pswire.frames import (
    REQUEST_HEADER_FIELD,
    SEED_CHUNK_FIELD,
    SEED_STATE_FIELD,
    encode_chunk,
    join_fields,
)
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import StepAtomicity
from pswire.optimizer_states import StateKey, encode_state
from pswire.schema_codec import optimizer_to_message, schema_to_message
from pswire.torch_types import buffer_of
from pswire.v1 import coordinator_service_pb2 as control
from pswire.v1 import membership_pb2, push_pb2
from pswire.v1 import parameter_service_pb2 as messages
from tests.doubles.byte_calls import CallContext, called
from tests.doubles.core_values import OPTIMIZERS, SCHEMA, key
from tests.doubles.garbled_messages import CHANGE_KINDS, Change, mutated
from tests.doubles.served_shard import ServedShard

TIMEOUT_S = 0.1
"""A call that waits for others is given up: nobody comes."""

REFUSED_S = 60.0
"""One that is refused waits for nobody."""

BUGS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}

checked = settings(derandomize=True, deadline=None, max_examples=250)

WORKER = membership_pb2.WorkerIdentity(worker_id="a", incarnation=1)
Requests = list[bytes]
Service = tuple[Any, Callable[..., CallContext]]


@st.composite
def edits(draw: st.DrawFn) -> list[Change]:
    """Changes to a message, of which places are shares of its length in 1/256."""
    kinds = st.sampled_from(CHANGE_KINDS)
    change = st.tuples(kinds, st.integers(0, 256), st.integers(0, 5), st.binary())
    return draw(st.lists(change, max_size=4))


def of(kind: type[Message], **fields: Any) -> bytes:  # noqa: ANN401, of a message
    """A message with those of these fields that its type has, as an honest caller's."""
    values = {
        "protocol_version": PROTOCOL_VERSION,
        "job_id": "job",
        "worker": WORKER,
        "shard_incarnation": 1,
        "generation": 1,
        "process_id": "process",
        **fields,
    }
    known = kind.DESCRIPTOR.fields_by_name
    own = {name: value for name, value in values.items() if name in known}
    return kind(**own).SerializeToString()


def shard_requests(shard: ServedShard) -> dict[str, Requests]:
    """A message or two of each method of a shard, as an honest worker sends them."""
    sequence = shard.host.model.core.closed_sequence(key("a")) + 1
    push = {"clock": sequence, "sequence": sequence, "optimizer": "optimizer"}
    (state,) = encode_state({StateKey(0, 1, "momentum_buffer"): torch.zeros(4)})
    part = push_pb2.OptimizerStatePart(
        chunk_index=0, optimizer="optimizer", tensors=state
    )
    stage = messages.StageOptimizerStateRequest
    staged = of(messages.StageOptimizerStateHeader, **push)
    choice = membership_pb2.ClockChoice(clock=sequence, workers=[WORKER])
    values = buffer_of(torch.ones(4))
    return {
        "PushPull": [
            shard.header("a", sequence),
            shard.chunk(0, 1.0),
            shard.trailer({0: 1.0}),
        ],
        "Push": [
            shard.header("a", sequence) + shard.trailer({0: 1.0}),
            shard.chunk(0, 1.0),
        ],
        "PushPullOnce": [shard.whole_push("a", sequence)],
        "Seed": [
            join_fields(
                (REQUEST_HEADER_FIELD, of(messages.SeedHeader, fence_number=1))
            ),
            join_fields((SEED_STATE_FIELD, part.SerializeToString())),
            encode_chunk(SEED_CHUNK_FIELD, index=0, presence=b"\1", data=values),
        ],
        "StageOptimizerState": [
            join_fields((1, staged)),
            of(stage, part=part),
        ],
        "Pull": [of(messages.PullRequest, clock=sequence - 1)],
        "GetSession": [of(messages.GetSessionRequest)],
        "AwaitContribution": [of(messages.AwaitContributionRequest, **push)],
        "Commit": [of(messages.CommitRequest, choice=choice)],
        "Ready": [of(messages.ReadyRequest, **push)],
        "PullOptimizerState": [
            of(messages.PullOptimizerStateRequest, **{**push, "clock": sequence - 1})
        ],
        "OpenSegments": [of(messages.OpenSegmentsRequest, boot_id="x")],
        "PullSnapshot": [of(messages.PullSnapshotRequest, snapshot_id=1)],
    }


def coordinator_requests() -> dict[str, Requests]:
    """A message or two of each method of a coordinator."""
    ranges = [push_pb2.DataRange(loader="loader", start=0, stop=8)]
    split = control.SplitRecord(name="split", recipe="{}", digest="0" * 64)
    join = of(
        control.JoinRequest,
        schema=schema_to_message(SCHEMA),
        optimizers=[optimizer_to_message(each) for each in OPTIMIZERS],
        loaders=["loader"],
    )
    fields: dict[str, dict[str, Any]] = {
        "RegisterShard": {"address": "host:1"},
        "WatchShard": {"incarnation": 1},
        "ReportFence": {"incarnation": 1, "fence_number": 1, "settled": True},
        "ReportCut": {"incarnation": 1, "snapshot_id": 1},
        "ReportCheckpoint": {
            "incarnation": 1,
            "snapshot_id": 1,
            "part": control.CheckpointPart(name="part", byte_count=1),
        },
        "DrainShard": {"incarnation": 1},
        "ReportProgress": {"incarnation": 1, "sharing": [WORKER]},
        "RegisterWorker": {"worker_id": "b"},
        "ReportSilence": {
            "shards": [control.ShardSilence(shard_index=0, silent_ms=9_000)]
        },
        "ReportWork": {
            "step_count": 3,
            "compute_s": 0.5,
            "activity": control.ACTIVITY_COMPUTING,
            "traffic": control.Traffic(
                sent_bytes=9,
                encodings=[control.EncodedBytes(encoding="raw", sent_bytes=8)],
            ),
            "metrics": [control.Metric(name="loss", value=0.5, step=3)],
            "recorded": control.RecordedSpans(
                number=1,
                spans=[control.Span(kind="compute", begin_us=1, duration_us=1)],
            ),
        },
        "WatchWorker": {},
        "DeclareOptimizer": {"optimizer": optimizer_to_message(OPTIMIZERS[0])},
        "Leave": {"sequence": 0, "consumed": ranges},
        "OpenEpoch": {"loader": "loader", "position_count": 64, "batch_size": 8},
        "LeaseData": {"loader": "loader", "batch_count_max": 1, "consumed": ranges},
        "RecordSplit": {"split": split},
        "ListSplits": {"name": "split"},
        "RequestSnapshot": {"newer_than": -1, "timeout_ms": 1},
        "ReleaseSnapshot": {"snapshot_id": 1, "pin_id": 1},
        "SaveCheckpoint": {"timeout_ms": 1},
        "RestoreCheckpoint": {"name": "step-000000000001", "timeout_ms": 1},
        "SaveState": {"snapshot_id": 1, "state": b"state"},
        "LoadState": {"checkpoint": "step-000000000001"},
        "SetMode": {"mode": membership_pb2.MODE_ASP, "timeout_ms": 1},
        "GetStatus": {},
        "GetHistory": {},
        "WatchEvents": {"after": 0},
        "RecordTrace": {"step_count": 3, "timeout_ms": 1},
    }
    found = {
        method: [of(getattr(control, f"{method}Request"), **values)]
        for method, values in fields.items()
    }
    return {**found, "Join": [join, join]}


def methods_of(service: str) -> list[str]:
    """Its methods as the contract has them, so that none can be left out."""
    descriptors: Any = (control.DESCRIPTOR, messages.DESCRIPTOR)
    (found,) = (
        each.services_by_name[service]
        for each in descriptors
        if service in each.services_by_name
    )
    return sorted(method.name for method in found.methods)


@contextmanager
def calls_of(service: str, make: Callable[[], Awaitable[Any]]) -> Iterator[Service]:
    """A service in an event loop of its own."""
    with asyncio.Runner() as runner:

        async def begin() -> Any:  # noqa: ANN401, either
            return await make()

        host, handlers = runner.run(begin())

        def call(
            method: str, requests: Requests, timeout_s: float = TIMEOUT_S
        ) -> CallContext:
            path = f"/pswire.v1.{service}/{method}"
            return runner.run(called(handlers, path, requests, timeout_s=timeout_s))

        yield host, call


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Calls say at once whom they wait for.

    Patched once, as services end in another order than they begin.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            "coordinator.rpc.worker_control",
            "shard.rpc.parameter_service",
            "shard.rpc.readiness",
            "shard.rpc.seed_call",
        ):
            patch.setattr(f"psserver.{module}.WAITING_INTERVAL_MS", 1)
        yield


@pytest.fixture(scope="module", params=["one phase", "two phases"])
def shard(request: pytest.FixtureRequest) -> Iterator[Service]:
    options: dict[str, Any] = {}
    if request.param == "two phases":
        options = {"step_atomicity": StepAtomicity.CLOCK, "backup_worker_count": 1}

    async def make() -> tuple[ServedShard, grpc.GenericRpcHandler]:
        shard = ServedShard(**options)
        shard.start(["a"])
        return shard, shard.service.handler()

    with calls_of("ParameterService", make) as service:
        yield service
        service[0].host.close()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with JobStore(tmp_path_factory.mktemp("coordinator")) as store:

        async def make() -> tuple[CoordinatorHost, grpc.GenericRpcHandler]:
            host = CoordinatorHost(
                CoordinatorSettings(job_id="job", shard_count=1), store
            )
            host.register_shard(process_id="process", address="host:1")
            host.register_worker(process_id="process", worker_id="a", address="host:2")
            assert host.core.settings.job_id == "job", "as the requests have it"
            return host, coordinator_handler(host)

        with calls_of("CoordinatorService", make) as service:
            yield service


def check(method: str, found: CallContext) -> None:
    assert found.code not in BUGS, (method, found.code, found.details)
    assert "Traceback" not in found.details


def garbled(requests: Requests, which: int, changes: list[Change]) -> Requests:
    """The same messages, but for one that is changed."""
    which %= len(requests)
    return [
        mutated(each, changes) if number == which else each
        for number, each in enumerate(requests)
    ]


@checked
@given(
    method=st.sampled_from(methods_of("ParameterService")),
    which=st.integers(0, 2),
    changes=edits(),
)
def test_a_shard_never_fails(
    shard: Service, method: str, which: int, changes: list[Change]
) -> None:
    served, call = shard
    requests = shard_requests(served)[method]

    check(method, call(method, garbled(requests, which, changes)))
    assert not served.host.end_reason


@checked
@given(
    method=st.sampled_from(methods_of("CoordinatorService")),
    which=st.integers(0, 1),
    changes=edits(),
)
def test_a_coordinator_never_fails(
    coordinator: Service, method: str, which: int, changes: list[Change]
) -> None:
    _, call = coordinator
    requests = coordinator_requests()[method]

    check(method, call(method, garbled(requests, which, changes)))


@pytest.mark.parametrize("method", methods_of("ParameterService"))
def test_garbage_to_a_shard_is_malformed(shard: Service, method: str) -> None:
    _, call = shard
    found = call(method, [b"\xff" * 64], REFUSED_S)
    assert found.code is grpc.StatusCode.INVALID_ARGUMENT, found.details


@pytest.mark.parametrize(
    "method", ["PushPull", "Push", "PushPullOnce", "Seed", "StageOptimizerState"]
)
def test_a_garbled_header_is_malformed(shard: Service, method: str) -> None:
    _, call = shard
    garbage = join_fields((REQUEST_HEADER_FIELD, b"\xff" * 4))
    found = call(method, [garbage + join_fields((2, b""))], REFUSED_S)
    assert found.code is grpc.StatusCode.INVALID_ARGUMENT, found.details
    assert "can't be parsed" in found.details


@pytest.mark.parametrize("method", methods_of("CoordinatorService"))
def test_garbage_to_a_coordinator_is_malformed(
    coordinator: Service, method: str
) -> None:
    _, call = coordinator
    found = call(method, [b"\xff" * 64], REFUSED_S)
    assert found.code is grpc.StatusCode.INVALID_ARGUMENT, found.details
