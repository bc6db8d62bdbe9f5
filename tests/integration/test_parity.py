"""A job trains to the numbers of one process, whatever the number of shards.

Real autograd on unequal batches: each worker has the gradient of its own samples, and
one process has that of all of them, so what differs is the order of the additions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pswire.membership import WorkerState
from pswire.optimizer_classes import class_named
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.job import Job, connect, deviation, run_workers

STEP_COUNT: Final = 50
SHUFFLED_STEP_COUNT: Final = 25
SEED: Final = 20261127
BATCHES: Final = {2: (11, 5), 3: (3, 9, 4)}
"""Samples of each worker in every step: 16 together."""

VARIANTS: Final[dict[str, list[dict[str, Any]]]] = {
    "SGD": [
        {"lr": 0.02},
        {"lr": 0.02, "momentum": 0.9},
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.3},
        {"lr": 0.02, "momentum": 0.9, "nesterov": True},
        {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.002, "momentum": 0.5, "maximize": True},
    ],
    "Adam": [
        {"lr": 0.01},
        {"lr": 0.01, "weight_decay": 0.1},
        {"lr": 0.01, "amsgrad": True},
        {"lr": 0.01, "betas": (0.5, 0.9)},
    ],
    "AdamW": [{"lr": 0.01}, {"lr": 0.01, "amsgrad": True}],
    "Adagrad": [{"lr": 0.05}, {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.01}],
    "RMSprop": [
        {"lr": 0.002, "eps": 1e-4},
        {"lr": 0.001, "eps": 1e-4, "centered": True, "momentum": 0.9},
        {"lr": 0.002, "eps": 1e-4, "weight_decay": 0.01, "alpha": 0.9},
    ],
    "Adamax": [{"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.01}],
    "NAdam": [{"lr": 0.01}, {"lr": 0.01, "decoupled_weight_decay": True}],
    "RAdam": [{"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.01}],
    "Adadelta": [{"lr": 0.5}, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.01}],
    "DelayedNesterov": [{"lr": 0.05}, {"lr": 0.05, "activation": 0.2}],
}
"""RMSprop has a larger `eps` than by default. It divides a gradient by its own size, so
that with 1e-8 the last bit of a small one decides: one process that takes the samples
in another order is then 3.5e-6 away, and float32 is 1.7e-5 from float64."""

COUNTS: Final = ((1, 2), (2, 3), (3, 2), (1, 3), (2, 2), (3, 3))
"""Shards and workers."""

CASES: Final = [
    pytest.param(
        name,
        variants[number % len(variants)],
        *COUNTS[(number + 3 * place) % 6],
        marks=pytest.mark.repeat if number > 1 else (),
    )
    for place, (name, variants) in enumerate(VARIANTS.items())
    for number in range(max(3, len(variants)))
]
"""Every variant of every class, and every class on 1, 2 and 3 shards by 2 and 3
workers; half of the classes see one half of the pairs of counts. `make test` has two
cases of each class: what a variant computes, unit tests of the shards hold too."""

ORDERED: Final = [
    pytest.param(name, marks=() if name in {"SGD", "Adam"} else pytest.mark.repeat)
    for name in VARIANTS
]
"""Gradients are added up before the optimizer sees them, whichever it is."""

small_chunks = cut_into(64, 512)
"""Cuts a model of a few KiB into a dozen chunks, on both sides alike."""


@dataclass(frozen=True)
class Training:
    """The same script for one process and for every worker."""

    class_name: str
    settings: dict[str, Any]

    def build(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 9), nn.LayerNorm(9)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        optimizer: torch.optim.Optimizer = class_named(self.class_name)(
            [
                {"params": model[0].parameters()},
                {
                    "params": [*model[2].parameters(), *model[3].parameters()],
                    "lr": self.settings["lr"] / 2,
                    "weight_decay": 0.02,
                },
            ],
            **self.settings,
        )
        schedule = LambdaLR(
            optimizer, [lambda n: 1 / (1 + 0.05 * n), lambda n: 1.0 if n < 30 else 0.3]
        )
        return model, optimizer, schedule

    @staticmethod
    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(SEED + step)
        return (
            torch.randn(16, 12, generator=generator),
            torch.randn(16, 9, generator=generator),
        )

    def in_one_process(self) -> list[torch.Tensor]:
        model, optimizer, schedule = self.build(0)
        for step in range(STEP_COUNT):
            inputs, targets = self.batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
        return values_of(model)

    def on_worker(
        self,
        job: Job,
        worker_id: str,
        *,
        step_count: int = STEP_COUNT,
        before_step: Callable[[str, int], None] = lambda worker_id, clock: None,
    ) -> list[torch.Tensor]:
        """Trains on this worker's rows of every batch."""
        rank = int(worker_id[1:])
        model, optimizer, schedule = self.build(rank)
        with connect(job, worker_id) as ps:
            model, optimizer, schedule = ps.prepare(model, optimizer, schedule)
            rows = BATCHES[job.workers_min]
            start = sum(rows[:rank])
            for step in range(step_count):
                inputs, targets = (
                    each[start : start + rows[rank]] for each in self.batch(step)
                )
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                before_step(worker_id, step + 1)
                optimizer.step(weight=rows[rank])
                schedule.step()
            assert ps.clock == step_count
        return values_of(model)


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("class_name", "settings", "shard_count", "worker_count"), CASES
)
def test_fifty_steps_equal_one_process(
    class_name: str,
    settings: dict[str, Any],
    shard_count: int,
    worker_count: int,
    tmp_path: Path,
) -> None:
    training = Training(class_name, settings)
    with Job(tmp_path, shard_count=shard_count, workers_min=worker_count) as job:
        results = run_workers(
            {
                f"w{rank}": lambda worker_id: training.on_worker(job, worker_id)
                for rank in range(worker_count)
            }
        )
        assert all(len(host.model.chunks) >= 1 for host in job.shards)

    assert all(same_bits(each, results["w0"]) for each in results.values())
    measured = deviation(results["w0"], training.in_one_process())
    print(f"seed {SEED}: deviation {measured:.2e}")
    assert measured <= DEVIATION_MAX


@pytest.mark.parametrize("class_name", ORDERED)
def test_the_orders_of_joining_and_arrival_leave_no_trace(
    class_name: str, tmp_path: Path
) -> None:
    training = Training(class_name, VARIANTS[class_name][-1])
    first = train_in_order(training, tmp_path / "a", ["w0", "w1", "w2"], turn=0)
    second = train_in_order(training, tmp_path / "b", ["w2", "w0", "w1"], turn=1)
    assert same_bits(first, second)


def train_in_order(
    training: Training, folder: Path, joining: list[str], *, turn: int
) -> list[torch.Tensor]:
    """Trains with workers that join in this order and push in a turning one."""
    with Job(folder, shard_count=2, workers_min=3) as job:

        def before_step(worker_id: str, clock: int) -> None:
            shift = clock * turn
            order = [joining[(place + shift) % 3] for place in range(3)]
            place = order.index(worker_id)
            if place:
                job.wait_pushed(order[place - 1], clock)

        def work(worker_id: str) -> list[torch.Tensor]:
            ahead = joining.index(worker_id)
            job.wait_workers(ahead, WorkerState.JOINING, WorkerState.MEMBER)
            return training.on_worker(
                job, worker_id, step_count=SHUFFLED_STEP_COUNT, before_step=before_step
            )

        return run_workers(dict.fromkeys(joining, work))["w0"]
