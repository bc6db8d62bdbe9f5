"""A model of some 10,000 parameters, and calls that do nothing on its shard."""

import math
from typing import Any, Final

import grpc.aio
import torch
from torch import nn

import psworker
from psctl.bench.machine import free_port
from psctl.bench.workload import Contender, Ground, Member
from psctl.daemons import ShardPlace
from pswire.channels import ChannelKind, aio_channel, blocking_channel
from psworker import event_loop

# The health check of gRPC, asked after the whole server: an empty message, answered
# from memory by the shard's own event loop.
_EMPTY_CALL: Final = "/grpc.health.v1.Health/Check"


def start_small(ground: Ground, *, worker_count: int, mode: str) -> dict[str, str]:
    """Starts a job of one shard whose address is known."""
    port = free_port()
    shard = f"127.0.0.1:{port}"
    coordinator = ground.start_job(
        worker_count=worker_count, mode=mode, places=[ShardPlace(shard, shard)]
    )
    return {"coordinator": coordinator, "shard": shard}


def small_steps(member: Member) -> Contender:
    """Steps of the small model; a repetition has `call_count` of each member."""
    width = max(1, math.isqrt(member.sizes.small_count // 2))
    ps = member.stack.enter_context(
        psworker.connect(member.places["coordinator"], f"bench-{member.rank}")
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = ps.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def run() -> None:
        for _ in range(member.sizes.call_count):
            optimizer.step()

    return Contender(run, amount=member.sizes.call_count * member.count)


def empty_calls(member: Member) -> Contender:
    """Calls that do nothing, to the same server, as many as there are steps."""
    channel = blocking_channel(member.places["shard"], ChannelKind.CONTROL)
    member.stack.callback(channel.close)
    call: Any = channel.unary_unary(_EMPTY_CALL)

    def run() -> None:
        for _ in range(member.sizes.call_count):
            call(b"")

    return Contender(run, amount=member.sizes.call_count * member.count)


def empty_loop_calls(member: Member) -> Contender:
    """The same calls as psworker makes its own: on its event loop, waited for."""
    loop = event_loop.acquire()
    member.stack.callback(event_loop.release)
    channel = loop.run(_opened(member.places["shard"]))
    member.stack.callback(lambda: loop.run(channel.close()))
    call: Any = channel.unary_unary(_EMPTY_CALL)

    async def ask() -> None:
        await call(b"")

    def run() -> None:
        for _ in range(member.sizes.call_count):
            loop.run(ask())

    return Contender(run, amount=member.sizes.call_count * member.count)


async def _opened(address: str) -> grpc.aio.Channel:
    return aio_channel(address, ChannelKind.DATA)
