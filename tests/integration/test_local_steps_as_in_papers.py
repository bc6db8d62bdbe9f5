"""Local steps in a whole job against a few lines of torch for all workers at once.

The simulation has the papers' formulas and nothing of a job. What is drawn: workers,
the length of rounds, weights, who joins when and who ends when.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

import psworker
from pswire.membership import WorkerState
from psworker.strategies.diloco import DiLoCo
from psworker.strategies.local_steps import LocalSteps, ModelAveraging, PostLocalSGD
from psworker.strategies.strategy import Strategy, Tensors
from tests.doubles.promised_numbers import FLOAT64_DEVIATION_MAX
from tests.integration.job import Job, connect, deviation, run_workers

Values = list[torch.Tensor]

JOINER = 9


def _model() -> nn.Module:
    """The same every time, whatever other threads draw."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    return model


def _inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    """One local step, on data that follows from the number of the batch."""
    generator = torch.Generator().manual_seed(batch)
    inputs = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def _values(model: nn.Module) -> Values:
    return [each.detach().clone() for each in model.parameters()]


@dataclass
class Part:
    """What one worker does.

    Attributes:
        number: Its batches are `1000 * number` and on.
        step_count: Local steps until it is done.
        weight: Of each of its pushes.
        joins_after: Clock of the first worker after which it joins, 0 for the start.
        is_lost: Whether it ends without a word.
        first_clock: Clock of its first push, as the job has it.
        taken: Its values after each push, by the clock of that.
    """

    number: int
    step_count: int
    weight: float
    joins_after: int = 0
    is_lost: bool = False
    first_clock: int = 1
    taken: dict[int, Values] = field(default_factory=dict)


@dataclass
class Paper:
    """What a paper says: the length of the round of a clock, and the outer step."""

    steps: Callable[[int], int]
    outer: Callable[[Values, Values], None]


def _simulate(paper: Paper, parts: list[Part]) -> dict[int, Values]:
    """The anchor after each clock, in one process."""
    anchor = _values(_model())
    found: dict[int, Values] = {}
    left = {part.number: part.step_count for part in parts}
    learners: dict[int, tuple[nn.Module, torch.optim.Optimizer]] = {}
    clock = 0
    while any(left.values()):
        clock += 1
        moved: list[tuple[float, Values]] = []
        for part in parts:
            count = min(paper.steps(clock), left[part.number])
            if part.first_clock > clock or not count:
                continue
            if part.number not in learners:
                model = _model()
                learners[part.number] = model, _inner(model)
            model, optimizer = learners[part.number]
            with torch.no_grad():
                for own, theirs in zip(model.parameters(), anchor, strict=True):
                    own.copy_(theirs)
            done = part.step_count - left[part.number]
            for step in range(done, done + count):
                _train(model, optimizer, 1000 * part.number + step)
            left[part.number] -= count
            if count == paper.steps(clock) or not part.is_lost:
                mine = zip(anchor, _values(model), strict=True)
                moved.append((part.weight, [a - b for a, b in mine]))
        if not moved:
            break
        total = sum(weight for weight, _ in moved)
        mean = [
            sum((w * each[i] for w, each in moved), torch.zeros(()).double()) / total
            for i in range(len(anchor))
        ]
        paper.outer(anchor, mean)
        found[clock] = [each.clone() for each in anchor]
    return found


def _averaging() -> Callable[[Values, Values], None]:
    def outer(anchor: Values, mean: Values) -> None:
        for value, moved in zip(anchor, mean, strict=True):
            value -= moved

    return outer


def _nesterov(lr: float, momentum: float) -> Callable[[Values, Values], None]:
    velocities: Values = []

    def outer(anchor: Values, mean: Values) -> None:
        if not velocities:
            velocities.extend(torch.zeros_like(each) for each in mean)
        for value, velocity, moved in zip(anchor, velocities, mean, strict=True):
            velocity.mul_(momentum).add_(moved)
            value -= lr * (moved + momentum * velocity)

    return outer


Draw = Callable[[random.Random], tuple[Callable[[], Strategy], Paper]]


def _draw_averaging(draw: random.Random) -> tuple[Callable[[], Strategy], Paper]:
    every = draw.randint(1, 5)
    return lambda: ModelAveraging(every), Paper(lambda clock: every, _averaging())


def _draw_growing(draw: random.Random) -> tuple[Callable[[], Strategy], Paper]:
    first, by = draw.randint(1, 3), draw.choice([0.5, 1.0])
    return (
        lambda: ModelAveraging(psworker.Growing(first=first, by=by)),
        Paper(lambda clock: first + int(by * (clock - 1)), _averaging()),
    )


def _draw_post_local(draw: random.Random) -> tuple[Callable[[], Strategy], Paper]:
    first, every = draw.randint(1, 6), draw.randint(2, 5)
    return (
        lambda: PostLocalSGD(first, every),
        Paper(lambda clock: 1 if clock <= first else every, _averaging()),
    )


def _draw_diloco(draw: random.Random) -> tuple[Callable[[], Strategy], Paper]:
    every, lr = draw.randint(1, 5), draw.choice([0.7, 0.4])
    return lambda: DiLoCo(every, lr=lr), Paper(lambda clock: every, _nesterov(lr, 0.9))


class _SlowMo(LocalSteps):
    """Momentum over rounds, of a rate that follows the clock: arXiv 1910.00643."""

    def __init__(
        self, every: int, rate_at: Callable[[int], float], momentum: float
    ) -> None:
        super().__init__(every, lambda p: torch.optim.SGD(p, lr=1.0, momentum=momentum))
        self.rate_at = rate_at

    @override
    def outer_hyperparameters(self, progress: psworker.Progress) -> dict[str, float]:
        return {"lr": self.rate_at(progress.clock)}

    @override
    def push(self, anchor: Tensors, local: Tensors, progress: psworker.Progress) -> Any:
        moved = torch._foreach_sub(list(anchor), list(local))
        return torch._foreach_div(moved, self.rate_at(progress.clock))


def _draw_slow_momentum(draw: random.Random) -> tuple[Callable[[], Strategy], Paper]:
    every, momentum = draw.randint(1, 5), draw.choice([0.5, 0.7])

    def rate_at(clock: int) -> float:
        return 0.1 / (1 + clock % 7)

    stepped: list[torch.optim.Optimizer] = []

    def outer(anchor: Values, mean: Values) -> None:
        if not stepped:
            stepped.append(torch.optim.SGD(anchor, lr=1.0, momentum=momentum))
            lambdas = torch.optim.lr_scheduler.LambdaLR(
                stepped[0], lambda number: rate_at(number + 1)
            )
            stepped[0].register_step_post_hook(lambda *_: lambdas.step())
        for value, moved in zip(anchor, mean, strict=True):
            value.grad = moved / stepped[0].param_groups[0]["lr"]
        stepped[0].step()

    return lambda: _SlowMo(every, rate_at, momentum), Paper(lambda clock: every, outer)


def _weighing(strategy: Strategy, weight: float) -> Strategy:
    """The same, with a weight of its own for each push."""
    base = type(strategy)

    class Weighing(base):  # type: ignore[valid-type, misc]
        @override
        def weight(self, progress: psworker.Progress) -> float:
            return weight

    strategy.__class__ = Weighing
    return strategy


WAYS = (
    _draw_averaging,
    _draw_growing,
    _draw_post_local,
    _draw_slow_momentum,
    _draw_diloco,
)


@pytest.mark.parametrize(
    ("draw_way", "seed"),
    [
        # With a worker that is lost one of them is enough every time.
        pytest.param(
            way,
            seed,
            marks=[] if seed == int(way is not _draw_diloco) else pytest.mark.repeat,
        )
        for way in WAYS
        for seed in range(4)
    ],
)
def test_a_job_trains_as_the_paper_has_it(
    tmp_path: Path, draw_way: Draw, seed: int
) -> None:
    draw = random.Random(f"{seed} {draw_way.__name__}")
    make, paper = draw_way(draw)
    parts = [
        Part(number, draw.randint(12, 25), draw.choice([1.0, 2.0, 3.5]))
        for number in range(3)
    ]
    # The job ends with these two, and goes on without another that is lost.
    parts[0].step_count = parts[1].step_count = 30
    parts[2].is_lost = not seed
    parts.append(Part(JOINER, draw.randint(5, 12), 1.5, joins_after=draw.randint(1, 3)))
    # So that nobody is done, or lost, before another of these has connected.
    all_are_here = threading.Barrier(3, timeout=60)
    began = {part.joins_after: threading.Event() for part in parts if part.joins_after}
    # Short where a worker is lost, and elsewhere nobody is evicted who is slow.
    lease_ttl_ms = 2_000 if parts[2].is_lost else 30_000
    with Job(tmp_path, workers_min=2, lease_ttl_ms=lease_ttl_ms) as job:

        def work(part: Part) -> None:
            if part.joins_after:
                assert began[part.joins_after].wait(60)
            ps = connect(job, f"w{part.number}")
            model = _model()
            optimizer = _inner(model)
            strategy = _weighing(make(), part.weight)
            ps.prepare(model, optimizer, strategy=strategy)
            begins_at = clock = ps.clock
            part.first_clock = begins_at + 1
            if not part.joins_after:
                all_are_here.wait()
            for step in range(part.step_count):
                _train(model, optimizer, 1000 * part.number + step)
                if ps.clock > clock:
                    clock = ps.clock
                    part.taken[clock] = _values(model)
                    for after, event in began.items():
                        # Not at that clock alone: the worker may have joined later.
                        if not part.number and clock >= after and not event.is_set():
                            event.set()
                            job.wait_worker(
                                f"w{JOINER}", WorkerState.JOINING, WorkerState.MEMBER
                            )
            if part.is_lost:
                ps._end(leaves=False)
            else:
                ps.close()

        works = {f"w{part.number}": part for part in parts}
        run_workers({name: _of(work, part) for name, part in works.items()})
    anchors = _simulate(paper, parts)
    for part in parts:
        assert part.taken
        for clock, values in part.taken.items():
            measured = deviation(values, anchors[clock])
            assert measured <= FLOAT64_DEVIATION_MAX, (part.number, clock, measured)


def _of(work: Callable[[Part], None], part: Part) -> Callable[[str], None]:
    return lambda worker_id: work(part)
