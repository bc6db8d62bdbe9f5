"""Steps of a model of some 10,000 parameters, beside calls that do nothing."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import grpc.aio
import torch
from torch import nn

from psctl.bench.machine import free_port
from psctl.bench.workload import (
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    rate_at_least,
    time_at_most,
)
from psctl.daemons import ShardPlace
from pswire.channels import ChannelKind, aio_channel, blocking_channel
from psworker import event_loop

# The health check of gRPC, asked after the whole server: an empty message, answered
# from memory by the shard's own event loop.
_EMPTY_CALL: Final = "/grpc.health.v1.Health/Check"


def _start_small(worker_count: int, mode: str, ground: Ground) -> dict[str, str]:
    """Starts a job of one shard whose address is known."""
    shard = f"127.0.0.1:{free_port()}"
    coordinator = ground.start_job(
        worker_count=worker_count, mode=mode, places=[ShardPlace(shard, shard)]
    )
    return {"coordinator": coordinator, "shard": shard}


def _repeated(member: Member, call: Callable[[], object]) -> Contender:
    """A call that is too short alone; each member makes `call_count` of them."""

    def run() -> None:
        for _ in range(member.sizes.call_count):
            call()

    return Contender(run, amount=member.sizes.call_count * member.count)


def small_steps(member: Member, place: str = "coordinator") -> Contender:
    """A worker that steps the small model in the job at a place."""
    width = max(1, math.isqrt(member.sizes.small_count // 2))
    ps = member.connect(place)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = ps.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return _repeated(member, optimizer.step)


def _empty_calls(member: Member) -> Contender:
    """Calls that do nothing, to the same server, as many as there are steps."""
    channel = blocking_channel(member.places["shard"], ChannelKind.CONTROL)
    member.stack.callback(channel.close)
    call: Any = channel.unary_unary(_EMPTY_CALL)
    return _repeated(member, lambda: call(b""))


def _empty_loop_calls(member: Member) -> Contender:
    """The same calls as psworker makes its own: on its event loop, waited for."""
    loop = event_loop.acquire()
    member.stack.callback(event_loop.release)
    channel = loop.run(lambda: _opened(member.places["shard"]))
    member.stack.callback(lambda: loop.run(channel.close))
    call: Any = channel.unary_unary(_EMPTY_CALL)

    async def ask() -> None:
        await call(b"")

    return _repeated(member, lambda: loop.run(ask))


async def _opened(address: str) -> grpc.aio.Channel:
    return aio_channel(address, ChannelKind.DATA)


SMALL: Final = Workload(
    name="small",
    about_s=10,
    title="BSP step of a model of 10,000 parameters, 1 worker, 1 shard",
    entries=(
        Entry("step", "optimizer.step() of a prepared optimizer", small_steps),
        Entry("empty_call", "blocking health check of the same server", _empty_calls),
        Entry(
            "empty_loop_call",
            "the same from psworker's event loop, which the caller waits for",
            _empty_loop_calls,
        ),
    ),
    targets=(time_at_most("step", 3.0, "empty_call"),),
    start=partial(_start_small, 1, "bsp"),
)

_PUSHING_COUNT: Final = 4

# How many pushes a shard takes in a second.
RATE: Final = Workload(
    name="rate",
    about_s=20,
    title="pushes in ASP of a model of 10,000 parameters, 4 worker processes, 1 shard",
    entries=(
        Entry("pushes", "optimizer.step() of prepared optimizers", small_steps),
        Entry("empty_calls", "blocking health checks of the same server", _empty_calls),
    ),
    targets=(rate_at_least("pushes", 0.8, "empty_calls"),),
    start=partial(_start_small, _PUSHING_COUNT, "asp"),
    member_count=_PUSHING_COUNT,
    thread_count=1,
)
