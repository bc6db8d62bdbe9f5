"""One big parameter and its gradient, the same for every contender."""

import torch
from torch import nn

import psworker
from psctl.bench.workload import Contender, Member

LEARNING_RATE = 1e-3


def big_tensors(member: Member) -> tuple[torch.Tensor, torch.Tensor]:
    """First values, the same in all members, and a gradient of each member's own."""
    count = member.sizes.element_count
    first = torch.randn(count, generator=torch.Generator().manual_seed(0))
    seed = torch.Generator().manual_seed(1 + member.rank)
    return first, torch.randn(count, generator=seed)


class OneParameter(nn.Module):
    """A model of one parameter."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


def stepping(
    member: Member,
    coordinator: str,
    *,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
    compression: str | psworker.Compression | None = None,
) -> Contender:
    """A worker that steps the big parameter in a job.

    Args:
        member: Of the workload.
        coordinator: Of the job.
        optimizer_class: What shards run, with the common learning rate.
        compression: How fewer bytes are sent, `None` for all.
    """
    first, gradient = big_tensors(member)
    ps = member.stack.enter_context(
        psworker.connect(coordinator, f"bench-{member.rank}")
    )
    model = OneParameter(first)
    optimizer = optimizer_class(model.parameters(), lr=LEARNING_RATE)  # type: ignore[call-arg]
    model, optimizer = ps.prepare(model, optimizer, compression=compression)
    model.weight.grad = gradient

    def run() -> None:
        optimizer.step()

    return Contender(run, values=lambda: [model.weight.detach()])
