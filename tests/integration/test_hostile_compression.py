"""Compressed gradients that no honest client sends: refused, and nothing changed."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
import pytest
import torch
from torch import nn

from pswire.encodings.known import ENCODINGS
from pswire.frames import (
    ENCODING_CHANGE,
    ENCODING_UNCHANGED,
)
from pswire.limits import PROTOCOL_VERSION
from pswire.reasons import ErrorReason
from pswire.v1 import membership_pb2, parameter_service_pb2
from psworker.tensors.compression import Compression
from tests.integration.forged_calls import (
    Messages,
    Target,
    check_goes_on,
    check_refused,
)
from tests.integration.job import Job, connect

COUNT: Final = 1024
"""Elements of the first chunk, of two."""
Make = Callable[[Target], Messages]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("compressed")
    with Job(folder, sockets=True) as job, connect(job, "w0") as ps:
        model = nn.Linear(COUNT, 2, bias=False)
        model, optimizer = ps.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            compression=Compression("topk", "topk", 0.1),
        )

        def step() -> None:
            before = model.weight.detach().clone()
            model(torch.ones(1, COUNT)).sum().backward()
            optimizer.step()
            model.zero_grad()
            assert not torch.equal(model.weight, before)

        step()
        with (
            grpc.insecure_channel(job.shard_addresses()[0]) as channel,
            grpc.insecure_channel(job.address) as coordinator,
        ):
            yield Target(job, channel, coordinator, step)


def sent(data: bytes, encoding: int = ENCODINGS["topk"].number) -> Make:
    return lambda target: [
        target.header(),
        target.chunk(target.own, data=data, encoding=encoding),
    ]


TOPK: Final = ENCODINGS["topk"].codec(0.1).encode(torch.ones(COUNT))

PUSHES: Final[dict[str, tuple[ErrorReason, str, Make]]] = {
    "another encoding": (
        ErrorReason.CHUNK_INVALID,
        "comes in encoding 16, and gradients of this job go as topk",
        sent(bytes(2 * COUNT), ENCODINGS["bf16"].number),
    ),
    "a change": (
        ErrorReason.CHUNK_INVALID,
        "comes in encoding 21, and gradients of this job go as topk",
        sent(bytes(24) + TOPK, ENCODING_CHANGE),
    ),
    "nothing": (
        ErrorReason.CHUNK_INVALID,
        "comes in encoding 22, and gradients of this job go as topk",
        sent(b"", ENCODING_UNCHANGED),
    ),
    "no elements": (
        ErrorReason.CHUNK_INVALID,
        "0 bytes came, and the numbers of 1024 take 4",
        sent(b""),
    ),
    "more elements than there are": (
        ErrorReason.CHUNK_INVALID,
        "4294967295 of 1024 elements came",
        sent(b"\xff" * 4 + TOPK[4:]),
    ),
    "an element beyond the chunk": (
        ErrorReason.CHUNK_INVALID,
        "their places are not ascending and below 1024",
        sent(b"\1\0\0\0" + bytes(4) + COUNT.to_bytes(2, "little")),
    ),
}


@pytest.mark.parametrize("name", PUSHES)
def test_a_push_is_refused(target: Target, name: str) -> None:
    check_refused(target, "PushPull", PUSHES[name])


def test_the_worker_goes_on(target: Target) -> None:
    check_goes_on(target, PUSHES.values())


def test_a_pull_tells_of_all_chunks_or_of_none(target: Target) -> None:
    host = target.job.shards[0]
    request = parameter_service_pb2.PullRequest(
        protocol_version=PROTOCOL_VERSION,
        job_id=host.job_id,
        worker=membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1),
        shard_incarnation=host.incarnation,
        generation=1,
        held_digests=[1, 2, 3, 4, 5],
    )
    call: Any = target.channel.unary_stream("/pswire.v1.ParameterService/Pull")
    text = "5 digests of what the caller has, for 1 chunks of shard 0"
    with pytest.raises(grpc.RpcError, match=text):
        list(call(request.SerializeToString()))
