"""A step of the big parameter with Adam, beside all-reduce and Adam in every worker."""

from typing import Final

import torch
from torch import distributed

from psctl.bench.workload import (
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    time_at_most,
)
from psctl.bench.workloads.big_parameter import (
    LEARNING_RATE,
    big_tensors,
    stepping,
)


def _paramserver(member: Member) -> Contender:
    return stepping(
        member, member.places["coordinator"], optimizer_class=torch.optim.Adam
    )


def _gloo(member: Member) -> Contender:
    first, gradient = big_tensors(member)
    parameter = torch.nn.Parameter(first)
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


def _workload(worker_count: int, limit: float, *, about_s: int) -> Workload:
    def start(ground: Ground) -> dict[str, str]:
        return {
            "coordinator": ground.start_job(shard_count=2, worker_count=worker_count)
        }

    return Workload(
        name=f"allreduce{worker_count}",
        about_s=about_s,
        title=f"BSP step of one big parameter with Adam, {worker_count} workers, "
        "2 shards, one host",
        entries=(
            Entry("paramserver", "optimizer.step(), Adam on the shards", _paramserver),
            Entry("gloo", "gloo all-reduce, then fused Adam in every process", _gloo),
        ),
        targets=(time_at_most("paramserver", limit, "gloo"),),
        start=start,
        member_count=worker_count,
        thread_count=1,
        tolerance=1e-3,
    )


ALLREDUCE_2: Final = _workload(2, 0.6, about_s=15)
ALLREDUCE_4: Final = _workload(4, 0.55, about_s=25)
