"""Workers whose values count the updates that are in them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import nn

import psworker
from psworker.connection import Connection
from tests.integration.job import Job, connect


@dataclass
class Worker:
    """A worker whose every gradient is one in every element, at a rate of one."""

    ps: Connection
    model: nn.Module
    optimizer: torch.optim.Optimizer
    pushes: list[psworker.PushResult] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        job: Job,
        worker_id: str,
        *,
        address: str = "",
        element_count: int = 2_000,
        clip_grad_norm: float | None = None,
        compression: str | None = None,
        **settings: float,
    ) -> "Worker":
        """Joins a job, at the coordinator's own address if none is given."""
        ps = connect(job, worker_id, address=address, **settings)
        model = nn.ParameterList([torch.zeros(8), torch.zeros(element_count)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        prepared = ps.prepare(
            model, optimizer, clip_grad_norm=clip_grad_norm, compression=compression
        )
        return cls(ps, *prepared)

    def backward(self) -> None:
        """Makes the gradient, as a script does before its step."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def step(self) -> psworker.PushResult:
        """A whole step of a script."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.ps.last_push is not None
        self.pushes.append(self.ps.last_push)
        return self.ps.last_push

    @property
    def value(self) -> float:
        """Less the updates that are in every element."""
        values = torch.cat([each.detach() for each in self.model.parameters()])
        assert values.unique().numel() == 1
        return float(values[0])


def run_all(*works: Callable[[], object]) -> None:
    """Runs these at once, to their ends."""
    with ThreadPoolExecutor(len(works)) as pool:
        for each in [pool.submit(work) for work in works]:
            each.result(60)
