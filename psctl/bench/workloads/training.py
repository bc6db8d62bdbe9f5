"""Training steps of a model of real arithmetic, with and without overlap."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from psctl.bench.limited_link import ProxyLink
from psctl.bench.workload import (
    OVER_TCP,
    Contender,
    Entry,
    Ground,
    Member,
    Sizes,
    Workload,
    rate_at_least,
)

if TYPE_CHECKING:
    from psworker import Connection

_WIDTH: Final = 1024
_SEED: Final = 7
_WORKER_COUNT: Final = 2
_STEP_COUNT: Final = 3
"""Of a repetition: values of one step arrive while the next one computes."""


def layer_count(sizes: Sizes) -> int:
    return max(2, round(sizes.parameter_count / (_WIDTH * (_WIDTH + 1))))


def parameter_count(sizes: Sizes) -> int:
    """Parameters that the model really has."""
    return layer_count(sizes) * _WIDTH * (_WIDTH + 1)


_SGD: Final = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


class Training:
    """The same model in each member, and a batch of each member's own."""

    def __init__(
        self,
        member: Member,
        optimizer_of: Callable[..., torch.optim.Optimizer] = _SGD,
    ) -> None:
        torch.manual_seed(_SEED)
        layers: list[nn.Module] = []
        for _ in range(layer_count(member.sizes)):
            layers += [nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
        self.model: Any = nn.Sequential(*layers)
        self.optimizer: Any = optimizer_of(self.model.parameters())
        generator = torch.Generator().manual_seed(_SEED + member.rank)
        self._inputs = torch.randn(member.sizes.batch_size, _WIDTH, generator=generator)

    def steps(self, count: int, ps: "Connection | None") -> Callable[[], None]:
        """Takes steps, until the values of the last one are there."""

        def run() -> None:
            for _ in range(count):
                self.model(self._inputs).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            if ps is not None:
                ps.wait()

        return run

    def values(self) -> list[torch.Tensor]:
        return [each.detach() for each in self.model.parameters()]


def _in_job(
    place: str, *, overlap: bool, member: Member
) -> "tuple[Training, Connection]":
    ps = member.connect(place)
    training = Training(member)
    training.model, training.optimizer = ps.prepare(
        training.model, training.optimizer, overlap=overlap
    )
    return training, ps


def _samples(
    member: Member, training: Training, ps: "Connection | None" = None
) -> Contender:
    return Contender(
        training.steps(_STEP_COUNT, ps),
        amount=_STEP_COUNT * member.sizes.batch_size * member.count,
        values=training.values,
    )


def _overlapped_samples(member: Member) -> Contender:
    return _samples(member, *_in_job("coordinator", overlap=True, member=member))


def _ddp_samples(member: Member) -> Contender:
    training = Training(member)
    training.model = DistributedDataParallel(training.model)
    return _samples(member, training)


DDP: Final = Workload(
    name="ddp",
    about_s=70,
    title="training step of a model of about 25 million parameters, 2 workers, figures "
    "of one sample",
    entries=(
        Entry("paramserver", "prepare(overlap=True), 2 shards", _overlapped_samples),
        Entry("ddp", "DistributedDataParallel on gloo, the same batches", _ddp_samples),
    ),
    targets=(rate_at_least("paramserver", 1.0, "ddp"),),
    start=lambda ground: {
        "coordinator": ground.start_job(shard_count=2, worker_count=_WORKER_COUNT)
    },
    member_count=_WORKER_COUNT,
    thread_count=1,
    tolerance=1e-3,
)


def _steps_alone(member: Member) -> Contender:
    count = member.sizes.call_count
    return Contender(Training(member).steps(count, None), amount=count)


def _steps_in_job(place: str, overlap: bool, member: Member) -> Contender:
    training, ps = _in_job(place, overlap=overlap, member=member)
    count = member.sizes.call_count
    return Contender(training.steps(count, ps), amount=count, values=training.values)


OVERLAP: Final = Workload(
    name="overlap",
    about_s=60,
    title="training step with and without prepare(overlap=True), beside one process",
    entries=(
        Entry("one_process", "plain torch", _steps_alone),
        Entry(
            "without_overlap",
            "overlap=False",
            partial(_steps_in_job, "without_overlap", False),
        ),
        Entry(
            "with_overlap", "overlap=True", partial(_steps_in_job, "with_overlap", True)
        ),
    ),
)
"""What `psctl bench overlap` measures, which adds the processes that it talks to."""


def overlap_of(
    *,
    worker_count: int,
    shard_count: int,
    bandwidth_mbit: float,
    latency_ms: float,
    thread_count: int,
) -> Workload:
    """`OVERLAP` with so many processes, and for a bandwidth above 0 with a link."""

    def start(ground: Ground) -> dict[str, str]:
        return {
            name: ground.start_job(
                name=name, shard_count=shard_count, worker_count=worker_count
            )
            for name in ("without_overlap", "with_overlap")
        }

    link = ProxyLink(bandwidth_mbit / shard_count, "asked for", latency_ms=latency_ms)
    return replace(
        OVERLAP,
        start=start,
        member_count=worker_count,
        thread_count=thread_count,
        # Shared memory would go past the link.
        environment=OVER_TCP if bandwidth_mbit else {},
        link=partial(nullcontext, link if bandwidth_mbit else None),
    )
