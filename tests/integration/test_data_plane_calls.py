"""Push and Pull apart, and a shard that answers while it applies a large chunk."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import torch
from torch import nn

from psserver.shard.tensors.apply_engine import AppliedChunk
from pswire.channels import ChannelKind, blocking_channel
from pswire.frames import (
    REQUEST_CHUNK_FIELD,
    REQUEST_HEADER_FIELD,
    REQUEST_TRAILER_FIELD,
    RESPONSE_CHUNK_FIELD,
    RESPONSE_REPLY_FIELD,
    decode_chunk,
    encode_chunk,
    join_fields,
    split_fields,
)
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import Mode, StepAtomicity
from pswire.schema import ElementType
from pswire.torch_types import buffer_of, tensor_from_buffer
from pswire.v1 import membership_pb2, parameter_service_pb2, push_pb2
from tests.integration.job import Crew, Job, connect, run_workers

SERVICE: Final = "/pswire.v1.ParameterService/"
ELEMENT_COUNT: Final = 3000
TIMEOUT_S: Final = 30.0


class OneValue(nn.Module):
    """A model of one flat parameter."""

    def __init__(self, element_count: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(element_count))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, shard_count=1, sockets=True) as job:
        yield job


def _identity() -> membership_pb2.WorkerIdentity:
    return membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1)


def _push_message(job: Job, sequence: int, gradient: torch.Tensor) -> bytes:
    """Header, trailer and the one chunk of a push of w0, in one message."""
    host = job.shards[0]
    spec = job.terms.optimizers[0]
    header = push_pb2.PushHeader(
        protocol_version=PROTOCOL_VERSION,
        job_id=host.job_id,
        optimizer=spec.name,
        worker=_identity(),
        shard_incarnation=host.incarnation,
        generation=1,
        sequence=sequence,
        sequence_unacknowledged_min=sequence,
        clock=sequence,
    )
    trailer = push_pb2.PushTrailer(
        weight=1.0, finite=True, loss_scale=1.0, chunk_bitmap=b"\x01"
    )
    trailer.groups.add(values=spec.groups[0].hyperparameters)
    return join_fields(
        (REQUEST_HEADER_FIELD, header.SerializeToString()),
        (REQUEST_TRAILER_FIELD, trailer.SerializeToString()),
    ) + encode_chunk(
        REQUEST_CHUNK_FIELD, index=0, presence=b"\x01", data=buffer_of(gradient)
    )


def _session(job: Job, channel: grpc.Channel) -> Any:  # noqa: ANN401, a message
    host = job.shards[0]
    request = parameter_service_pb2.GetSessionRequest(
        protocol_version=PROTOCOL_VERSION,
        job_id=host.job_id,
        worker=_identity(),
        shard_incarnation=host.incarnation,
    )
    call = channel.unary_unary(
        SERVICE + "GetSession",
        request_serializer=parameter_service_pb2.GetSessionRequest.SerializeToString,
        response_deserializer=parameter_service_pb2.GetSessionResponse.FromString,
    )
    return call(request, timeout=TIMEOUT_S)


def test_a_push_alone_brings_no_values_and_a_pull_brings_them_all(job: Job) -> None:
    model = OneValue(ELEMENT_COUNT)
    ps = connect(job, "w0")
    ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    address = job.shard_addresses()[0]
    with blocking_channel(address, ChannelKind.DATA) as channel:
        gradient = torch.arange(ELEMENT_COUNT, dtype=torch.float32)
        push: Any = channel.stream_unary(SERVICE + "Push")
        answer = push(iter([_push_message(job, 1, gradient)]), timeout=TIMEOUT_S)
        reply = parameter_service_pb2.PushResponse.FromString(answer).reply
        again = push(iter([_push_message(job, 1, gradient)]), timeout=TIMEOUT_S)
        pull: Any = channel.unary_stream(SERVICE + "Pull")
        request = parameter_service_pb2.PullRequest(
            protocol_version=PROTOCOL_VERSION,
            job_id=job.shards[0].job_id,
            worker=_identity(),
            shard_incarnation=job.shards[0].incarnation,
            generation=1,
            clock=1,
        )
        fields = [
            field
            for message in pull(request.SerializeToString(), timeout=TIMEOUT_S)
            for field in split_fields(message)
        ]
        assert _session(job, channel).sequence_done_max == 1
    ps.close()

    assert (reply.outcome, reply.clock) == (push_pb2.OUTCOME_APPLIED, 1)
    duplicate = parameter_service_pb2.PushResponse.FromString(again).reply
    assert duplicate.outcome == push_pb2.OUTCOME_DUPLICATE
    assert [number for number, _ in fields] == [
        RESPONSE_CHUNK_FIELD,
        RESPONSE_REPLY_FIELD,
    ]
    values = tensor_from_buffer(decode_chunk(fields[0][1]).data, ElementType.FLOAT32)
    assert torch.equal(values, -0.5 * gradient)


def test_other_calls_are_answered_while_a_large_chunk_is_applied(job: Job) -> None:
    """The apply is held open in its thread; an event loop that did the arithmetic
    itself would answer nothing until then."""
    applying, go_on = threading.Event(), threading.Event()

    def work(worker_id: str) -> int:
        model = OneValue(1 << 18)
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=1.0)
            )
            engine = job.shards[0].model.engine
            apply = engine.apply

            def held(*arguments: Any, **named: Any) -> AppliedChunk:  # noqa: ANN401
                applying.set()
                assert go_on.wait(TIMEOUT_S)
                return apply(*arguments, **named)

            engine.apply = held  # type: ignore[method-assign]
            model.values.grad = torch.ones_like(model.values)
            optimizer.step()
            assert torch.equal(model.values.detach(), -torch.ones(1 << 18))
            return ps.clock

    with Crew({"w0": work}) as crew:
        try:
            assert applying.wait(TIMEOUT_S)
            with blocking_channel(
                job.shard_addresses()[0], ChannelKind.DATA
            ) as channel:
                session = _session(job, channel)
            assert session.sequence_done_max == 0
            assert [push.sequence for push in session.pushes] == [1]
        finally:
            go_on.set()
        assert crew.results() == {"w0": 1}


@pytest.mark.parametrize("atomicity", StepAtomicity)
@pytest.mark.parametrize(("mode", "bound"), [(Mode.SSP, 1), (Mode.ASP, None)])
@pytest.mark.parametrize("element_count", [ELEMENT_COUNT, 1 << 17])
def test_every_push_is_in_the_values_once(
    tmp_path: Path,
    mode: Mode,
    bound: int | None,
    atomicity: StepAtomicity,
    element_count: int,
) -> None:
    """Each push of ones moves all values by one, whoever pushes and when; a model of
    several chunks is applied and read in threads."""
    step_count = 12

    def work(worker_id: str) -> torch.Tensor:
        model = OneValue(element_count)
        with connect(running, worker_id) as ps:
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=1.0)
            )
            for _ in range(step_count):
                model.values.grad = torch.ones_like(model.values)
                optimizer.step()
            values: torch.Tensor = model.values.detach().clone()
            return values

    with Job(
        tmp_path,
        workers_min=2,
        mode=mode,
        staleness_bound=bound,
        step_atomicity=atomicity,
        sockets=True,
    ) as running:
        pulled = run_workers({"w0": work, "w1": work})
        held = running.ask(
            lambda: [
                tensor_from_buffer(
                    memoryview(bytes(host.model.engine.vectors.read(chunk.index))),
                    ElementType.FLOAT32,
                )
                for host in running.shards
                for chunk in host.model.chunks
            ]
        )

    for values in held:
        assert torch.equal(values, torch.full_like(values, -2.0 * step_count))
    slack = step_count if bound is None else bound
    for values in pulled.values():
        # All of its own, and of the other all but what the bound lets lack.
        assert float(values.max()) <= -(2 * step_count - slack)


def test_a_push_without_values_is_refused_when_steps_have_two_phases(
    tmp_path: Path,
) -> None:
    with Job(
        tmp_path, shard_count=1, step_atomicity=StepAtomicity.CLOCK, sockets=True
    ) as job:
        model = OneValue(ELEMENT_COUNT)
        with connect(job, "w0") as ps:
            ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
            address = job.shard_addresses()[0]
            with blocking_channel(address, ChannelKind.DATA) as channel:
                push: Any = channel.stream_unary(SERVICE + "Push")
                message = _push_message(job, 1, torch.zeros(ELEMENT_COUNT))
                with pytest.raises(grpc.RpcError, match="PushPull"):
                    push(iter([message]), timeout=TIMEOUT_S)
