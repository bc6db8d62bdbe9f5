"""Push, apply and pull of one big parameter: over TCP, on one host, over a slow link.

Its first values and its gradient are the same for every contender.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import distributed, nn

import psworker
from psctl.bench.bare_stream import BareStreamClient
from psctl.bench.limited_link import limited_link
from psctl.bench.machine import free_port
from psctl.bench.torch_rpc import Transports, rpc_steps, start_server
from psctl.bench.workload import (
    OVER_TCP,
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    rate_at_least,
    time_at_most,
)
from psworker import event_loop

LEARNING_RATE: Final = 1e-3


def big_tensors(member: Member) -> tuple[torch.Tensor, torch.Tensor]:
    """First values, the same in all members, and a gradient of each member's own."""
    count = member.sizes.element_count
    first = torch.randn(count, generator=torch.Generator().manual_seed(0))
    seed = torch.Generator().manual_seed(1 + member.rank)
    return first, torch.randn(count, generator=seed)


class OneParameter(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


def job_steps(
    place: str = "coordinator",
    *,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
    compression: str | psworker.Compression | None = None,
) -> Callable[[Member], Contender]:
    """Begins a worker that steps the big parameter in the job at a place."""

    def begin(member: Member) -> Contender:
        first, gradient = big_tensors(member)
        ps = member.connect(place)
        model = OneParameter(first)
        optimizer = optimizer_class(model.parameters(), lr=LEARNING_RATE)  # type: ignore[call-arg]
        model, optimizer = ps.prepare(model, optimizer, compression=compression)
        model.weight.grad = gradient

        def run() -> None:
            optimizer.step()

        # With fewer bytes values differ, which is no matter of time.
        values = None if compression else lambda: [model.weight.detach()]
        return Contender(run, values=values)

    return begin


def _rpc_steps(transports: Transports, member: Member) -> Contender:
    first, gradient = big_tensors(member)
    return rpc_steps(
        member, transports, first=first, gradient=gradient, rate=LEARNING_RATE
    )


def _bare_stream(member: Member) -> Contender:
    first, gradient = big_tensors(member)
    loop = event_loop.acquire()
    member.stack.callback(event_loop.release)
    client = BareStreamClient(loop, int(member.places["bare"]), first)
    member.stack.callback(client.close)
    return Contender(
        lambda: client.step(gradient), values=lambda: [client.values.clone()]
    )


def _gloo(member: Member) -> Contender:
    first, gradient = big_tensors(member)
    parameter = nn.Parameter(first)
    optimizer = torch.optim.Adam([parameter], lr=LEARNING_RATE, fused=True)
    total = parameter.grad = torch.empty_like(first)
    # gloo only sums. A loss that is divided beforehand gives the mean for nothing.
    share = gradient / member.count

    def before() -> None:
        # As a backward pass would: the sum is written over the gradient.
        total.copy_(share)

    def run() -> None:
        distributed.all_reduce(total)
        optimizer.step()

    return Contender(run, before=before, values=lambda: [parameter.detach()])


def _start_with_rpc(transports: Transports, ground: Ground) -> dict[str, str]:
    return {
        "coordinator": ground.start_job(),
        "rpc": start_server(ground, transports),
    }


def _start_exchange(ground: Ground) -> dict[str, str]:
    bare_port = str(free_port())
    ground.start(
        "bare stream",
        "psctl.bench.bare_stream",
        *(bare_port, str(ground.sizes.element_count), str(LEARNING_RATE)),
    )
    return {"bare": bare_port, **_start_with_rpc(Transports.TCP, ground)}


OURS: Final = Entry(
    "paramserver", "optimizer.step() of a prepared optimizer", job_steps()
)

TORCH_RPC: Final = Entry(
    "torch_rpc",
    "torch.distributed.rpc over TCP alone, the same SGD on its server",
    partial(_rpc_steps, Transports.TCP),
)

STEP: Final = Workload(
    name="step",
    about_s=10,
    title="push + apply (SGD) + pull of one big parameter, 1 worker, 1 shard, one host",
    entries=(OURS, TORCH_RPC),
    start=partial(_start_with_rpc, Transports.TCP),
)
"""What `psctl bench step` measures."""

EXCHANGE: Final = Workload(
    name="exchange",
    about_s=20,
    title="push + apply (SGD) + pull of one big parameter, 1 worker, 1 shard, TCP",
    entries=(
        OURS,
        TORCH_RPC,
        Entry(
            "bare_stream",
            "asyncio gRPC stream of 1 MiB chunks on uvloop, SGD in the handler, "
            "nothing checked",
            _bare_stream,
        ),
    ),
    targets=(
        time_at_most("paramserver", 1.1, "torch_rpc"),
        time_at_most("paramserver", 0.95, "bare_stream"),
    ),
    start=_start_exchange,
    environment=OVER_TCP,
)

SHARDS: Final = Workload(
    name="shards",
    about_s=20,
    title="push + apply (SGD) + pull of one big parameter, 2 shards against 1, TCP",
    entries=(
        Entry(
            "one_shard",
            "optimizer.step() in a job of one shard",
            job_steps("one_shard"),
        ),
        Entry(
            "two_shards",
            "optimizer.step() in a job of two shards",
            job_steps("two_shards"),
        ),
    ),
    targets=(time_at_most("two_shards", 0.9, "one_shard"),),
    start=lambda ground: {
        "one_shard": ground.start_job(shard_count=1, name="one"),
        "two_shards": ground.start_job(shard_count=2, name="two"),
    },
    environment=OVER_TCP,
)

ONE_HOST: Final = Workload(
    name="one_host",
    about_s=15,
    title="push + apply (SGD) + pull of one big parameter, transports as each chooses",
    entries=(
        OURS,
        replace(
            TORCH_RPC,
            text="torch.distributed.rpc, which uses shared memory on one host",
            begin=partial(_rpc_steps, Transports.CHOSEN),
        ),
    ),
    targets=(time_at_most("paramserver", 0.4, "torch_rpc"),),
    start=partial(_start_with_rpc, Transports.CHOSEN),
)

_LINK_MBIT: Final = 200.0

# What fewer bytes cost in accuracy is no matter of time: docs/compression.md.
LINK: Final = Workload(
    name="link",
    about_s=75,
    title=f"push + apply (SGD) + pull of one big parameter, link of {_LINK_MBIT:g} "
    "Mbit/s",
    entries=(
        Entry("fp32", "elements as they are", job_steps("fp32")),
        Entry(
            "int8",
            'compression="int8", both ways',
            job_steps("int8", compression="int8"),
        ),
        Entry(
            "topk",
            "1 % of the elements both ways, with residuals",
            job_steps("topk", compression=psworker.Compression("topk", "topk", 0.01)),
        ),
    ),
    targets=(rate_at_least("int8", 3.3, "fp32"), rate_at_least("topk", 8.0, "fp32")),
    # Jobs of their own: compression is one of a job's settings.
    start=lambda ground: {
        name: ground.start_job(name=name) for name in ("fp32", "int8", "topk")
    },
    environment=OVER_TCP,
    link=partial(limited_link, _LINK_MBIT),
)


def _allreduce(worker_count: int, limit: float, *, about_s: int) -> Workload:
    """With Adam, beside all-reduce and Adam in every worker."""
    return Workload(
        name=f"allreduce{worker_count}",
        about_s=about_s,
        title=f"BSP step of one big parameter with Adam, {worker_count} workers, "
        "2 shards, one host",
        entries=(
            Entry(
                "paramserver",
                "optimizer.step(), Adam on the shards",
                job_steps(optimizer_class=torch.optim.Adam),
            ),
            Entry("gloo", "gloo all-reduce, then fused Adam in every process", _gloo),
        ),
        targets=(time_at_most("paramserver", limit, "gloo"),),
        start=lambda ground: {
            "coordinator": ground.start_job(shard_count=2, worker_count=worker_count)
        },
        member_count=worker_count,
        thread_count=1,
        tolerance=1e-3,
    )


ALLREDUCE_2: Final = _allreduce(2, 0.6, about_s=15)
ALLREDUCE_4: Final = _allreduce(4, 0.55, about_s=25)
