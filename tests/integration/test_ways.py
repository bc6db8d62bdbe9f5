"""Named strategies in a whole job equal their papers' algorithms, step by step.

How many workers, their steps, and who joins and leaves when are drawn; what the job
made of it is read from what each worker pushed, and is computed by hand.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

import psworker
from pswire.membership import Mode, ModeTerms
from psworker.strategies.delayed_nesterov import AsyncLocalSGD
from psworker.strategies.downpour import Downpour
from psworker.strategies.elastic import EASGD, AsynchronousEASGD
from psworker.strategies.fedavg import FedAvg, FedProx
from psworker.strategies.strategy import Strategy, Tensors, Turn
from tests.doubles import strategies_by_hand as by_hand
from tests.doubles.promised_numbers import FLOAT64_DEVIATION_MAX
from tests.doubles.strategies_by_hand import Values
from tests.integration.job import Job, connect, deviation, run_workers

ETA = 0.05
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.repeat) for seed in range(2, 9))]


def batch(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return (
        torch.randn(4, 3, generator=generator).double() + worker,
        torch.randn(4, 2, generator=generator).double(),
    )


def gradient(worker: int, step: int, x: Values) -> Values:
    weight, bias = (each.clone().requires_grad_() for each in x)
    inputs, targets = batch(worker, step)
    loss = nn.functional.mse_loss(nn.functional.linear(inputs, weight, bias), targets)
    return list(torch.autograd.grad(loss, [weight, bias]))


def first_values() -> Values:
    return [torch.full((2, 3), 0.5).double(), torch.tensor([0.25, -0.25]).double()]


@dataclass
class Trained:
    """A worker's script, a step at a time.

    Attributes:
        pushes: Of each push the clock, its steps, and the workers that there were.
    """

    worker: int
    job: Job
    strategy: Strategy
    with_closure: bool = False
    step_count: int = 0
    pushes: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watch_pushes()
        self.ps = connect(self.job, f"w{self.worker}")
        self.model = nn.Linear(3, 2).double()
        with torch.no_grad():
            for own, first in zip(self.model.parameters(), first_values(), strict=True):
                own.copy_(first + self.worker)  # those of worker 0 count
        optimizer = torch.optim.SGD(self.model.parameters(), lr=ETA)
        self.model, self.optimizer = self.ps.prepare(
            self.model, optimizer, strategy=self.strategy
        )

    def _watch_pushes(self) -> None:
        push = self.strategy.push

        def watched(
            anchor: Tensors, local: Tensors, progress: psworker.Progress
        ) -> Any:  # noqa: ANN401
            self.pushes.append(
                (progress.clock, progress.step_count, progress.worker_count)
            )
            return push(anchor, local, progress)

        self.strategy.push = watched  # type: ignore[method-assign]

    def step(self) -> None:
        inputs, targets = batch(self.worker, self.step_count)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            loss.backward()
            return loss

        if self.with_closure:
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        self.step_count += 1

    @property
    def values(self) -> Values:
        return [each.detach().clone() for each in self.model.parameters()]


def anchor_of(job: Job) -> Values:
    with psworker.SnapshotReader(job.address) as reader:
        found = reader.latest().state_dict()
    return [found["weight"], found["bias"]]


# In step


def trained_in_step(
    job: Job, strategies: Sequence[Strategy], step_counts: Sequence[int]
) -> dict[int, Trained]:
    """Trains a worker for each strategy, for so many steps, all from the start."""

    def work(worker_id: str) -> Trained:
        worker = int(worker_id[1:])
        trained = Trained(worker, job, strategies[worker], with_closure=worker == 1)
        with trained.ps:
            while trained.step_count < step_counts[worker]:
                trained.step()
        return trained

    found = run_workers({f"w{each}": work for each in range(len(strategies))})
    return {each.worker: each for each in found.values()}


def by_clock(trained: dict[int, Trained]) -> list[dict[int, tuple[int, int]]]:
    """Steps of each worker that pushed, and how many it knew of, clock by clock."""
    found: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    for each in trained.values():
        for clock, step_count, worker_count in each.pushes:
            found[clock][each.worker] = step_count, worker_count
    return [found[clock] for clock in sorted(found)]


@pytest.mark.parametrize("seed", SEEDS)
def test_elastic_averaging_in_step(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    tau, beta = draw.randint(1, 4), draw.choice([0.5, 0.9])
    worker_count = draw.randint(2, 4)
    step_counts = [tau * draw.randint(2, 7) + draw.randint(0, tau) for _ in range(4)]
    with Job(tmp_path, workers_min=worker_count) as job:
        trained = trained_in_step(
            job, [EASGD(tau, beta=beta) for _ in range(worker_count)], step_counts
        )
        anchor = anchor_of(job)
    workers = by_hand.Workers(gradient, ETA)
    center = by_hand.easgd(first_values(), workers, by_clock(trained), beta)
    for worker, each in trained.items():
        assert deviation(each.values, workers.x[worker]) < FLOAT64_DEVIATION_MAX
    assert deviation(anchor, center) < FLOAT64_DEVIATION_MAX


@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_federated_averaging(mu: float, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    worker_count = draw.randint(2, 4)
    fraction = draw.choice([0.1, 0.5, 0.75, 1.0])
    tau = [draw.randint(2, 4) for _ in range(worker_count)]

    def strategy(worker: int) -> FedAvg:
        if not mu:
            return FedAvg(tau[worker], fraction=fraction, seed=seed)
        return FedProx(tau[worker], mu=mu, fraction=fraction, seed=seed)

    strategies = [strategy(each) for each in range(worker_count)]
    with Job(tmp_path, workers_min=worker_count) as job:
        trained = trained_in_step(
            job, strategies, [each * draw.randint(2, 4) for each in tau]
        )
        anchor = anchor_of(job)
    rounds = by_clock(trained)
    # Later on one that is drawn may have done all its steps, and leave, and not all
    # hear of it in the same clock.
    until = min(each.pushes[-1][0] for each in trained.values())
    assert until
    for clock, taking in enumerate(rounds[:until], start=1):
        assert all(count == worker_count for _, count in taking.values())
        assert len(taking) == max(1, round(fraction * worker_count))
        assert all(
            strategies[0].takes_part(Turn(clock, each, worker_count)) for each in taking
        )
    samples = [{k: (n, float(n)) for k, (n, _) in each.items()} for each in rounds]
    expected = by_hand.fedavg(first_values(), gradient, samples, ETA, mu)
    assert deviation(anchor, expected) < FLOAT64_DEVIATION_MAX


def test_who_is_drawn_into_a_round_is_known_and_all_come_in_time() -> None:
    for worker_count in (1, 3, 10):
        for fraction in (0.01, 0.1, 0.25, 1.0):
            strategy = FedAvg(1, fraction=fraction, seed=7)
            met: set[int] = set()
            for clock in range(1, 80):
                chosen = {
                    place
                    for place in range(worker_count)
                    if strategy.takes_part(Turn(clock, place, worker_count))
                }
                assert len(chosen) == max(1, round(fraction * worker_count))
                met |= chosen
            assert met == set(range(worker_count)) or worker_count * fraction < 1
    seven, eight = (FedAvg(1, fraction=0.5, seed=seed) for seed in (7, 8))
    turns = [Turn(clock, 0, 4) for clock in range(1, 50)]
    assert [seven.takes_part(turn) for turn in turns] == [
        FedAvg(1, fraction=0.5, seed=7).takes_part(turn) for turn in turns
    ]
    assert [seven.takes_part(turn) for turn in turns] != [
        eight.takes_part(turn) for turn in turns
    ]


# Each on a clock of its own


@dataclass
class Asynchronous:
    """Workers of a job in ASP, which take turns as drawn, in one thread.

    Attributes:
        events: Steps and pushes in their order.
        values: Those of each worker after its last step.
    """

    draw: random.Random
    make: Callable[[], Strategy]
    events: list[by_hand.Event] = field(default_factory=list)
    values: dict[int, Values] = field(default_factory=dict)
    anchor: Values = field(default_factory=list)
    _present: dict[int, Trained] = field(default_factory=dict)

    def train(self, folder: Path, step_count: int) -> None:
        """Takes steps; now and then a worker joins, or leaves with what it has."""
        with Job(folder, mode=Mode.ASP) as job:
            try:
                for number in range(step_count):
                    if number in (0, 4) or self.draw.random() < 0.1:
                        self._join(job, len(self.values))
                    elif self.draw.random() < 0.05 and len(self._present) > 1:
                        self._leave(self.draw.choice(sorted(self._present)))
                    self._step(self.draw.choice(sorted(self._present)))
                self.anchor = anchor_of(job)
            finally:
                for each in self._present.values():
                    each.ps.close()

    def _join(self, job: Job, worker: int) -> None:
        self._present[worker] = Trained(worker, job, self.make())
        self.values[worker] = self._present[worker].values
        self._meet()
        for _ in range(4 if worker else 0):  # pushes that come before its first step
            self._step(min(self._present))

    def _leave(self, worker: int) -> None:
        gone = self._present.pop(worker)
        before = len(gone.pushes)
        gone.ps.close()
        self._note(worker, gone, before)
        self._meet()

    def _meet(self) -> None:
        """Waits until all know how many there are."""
        until = time.monotonic() + 20
        wanted = len(self._present)
        while any(each.ps.worker_count != wanted for each in self._present.values()):
            assert time.monotonic() < until, "the record has not come"
            time.sleep(0.001)

    def _step(self, worker: int) -> None:
        trained = self._present[worker]
        before = len(trained.pushes)
        trained.step()
        self.events.append((worker, 0))
        self._note(worker, trained, before)

    def _note(self, worker: int, trained: Trained, before: int) -> None:
        self.values[worker] = trained.values
        self.events += [(worker, count) for *_, count in trained.pushes[before:]]


@pytest.mark.parametrize("seed", SEEDS)
def test_elastic_averaging_on_clocks_of_their_own(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    tau, beta = draw.randint(1, 4), draw.choice([0.5, 0.9])
    job = Asynchronous(draw, lambda: AsynchronousEASGD(tau, beta=beta))
    job.train(tmp_path, 40)
    workers = by_hand.Workers(gradient, ETA)
    center = by_hand.easgd_asynchronous(first_values(), workers, job.events, beta)
    check(job, center, workers)


@pytest.mark.parametrize("seed", SEEDS)
def test_asynchronous_local_steps_with_a_delayed_momentum(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    tau, size = draw.randint(1, 4), draw.randint(1, 4)
    job = Asynchronous(
        draw, lambda: AsyncLocalSGD(tau, buffer_size=size, activation=0.5 / size)
    )
    job.train(tmp_path, 40)
    workers = by_hand.Workers(gradient, ETA)
    theta = by_hand.asynchronous_local_sgd(
        first_values(),
        workers,
        job.events,
        epsilon=0.7,
        beta=0.9,
        size=size,
        c=0.5 / size,
    )
    check(job, theta, workers)


def check(job: Asynchronous, anchor: Values, workers: by_hand.Workers) -> None:
    assert len(workers.x) > 1
    assert deviation(job.anchor, anchor) < FLOAT64_DEVIATION_MAX
    for worker, values in workers.x.items():
        assert deviation(job.values[worker], values) < FLOAT64_DEVIATION_MAX


@pytest.mark.parametrize("seed", SEEDS)
def test_downpour(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    n_push = draw.randint(1, 3)
    n_fetch = n_push * draw.randint(1, 3)
    job = Asynchronous(draw, lambda: Downpour(n_push, n_fetch))
    job.train(tmp_path, 40)
    workers = by_hand.Workers(gradient, ETA)
    server = by_hand.downpour(
        first_values(),
        workers,
        job.events,
        n_fetch=n_fetch,
        gamma=0.01,
    )
    check(job, server, workers)


class _Interrupted(Downpour):
    """Notes its gradients and pushes, and has a push begin as the mode changes."""

    def __init__(self, change: Callable[[], None]) -> None:
        super().__init__(2)
        self.change: Callable[[], None] | None = change
        self.gradients: list[Values] = []
        self.pushed: list[Values] = []

    @override
    def before_step(self, local: Tensors, anchor: Tensors) -> None:
        found = (each.grad for each in local)
        self.gradients.append([each.clone() for each in found if each is not None])
        super().before_step(local, anchor)

    @override
    def push(
        self, anchor: Tensors, local: Tensors, progress: psworker.Progress
    ) -> Sequence[torch.Tensor | None]:
        found = super().push(anchor, local, progress)
        self.pushed.append([each.clone() for each in found if each is not None])
        return found

    @override
    def weight(self, progress: psworker.Progress) -> float:
        change, self.change = self.change, None
        if change is not None:
            change()
        return super().weight(progress)


def test_gradients_of_a_push_that_was_not_made_go_with_the_next(tmp_path: Path) -> None:
    """The mode has changed meanwhile, and with it which clock is the worker's next."""

    def change() -> None:
        job.run(job.coordinator.set_mode(ModeTerms(Mode.SSP, 4), timeout_s=10))
        until = time.monotonic() + 20
        while behind.ps.mode != "ssp":
            assert time.monotonic() < until
            time.sleep(0.001)

    strategy = _Interrupted(change)
    with Job(tmp_path, mode=Mode.ASP) as job:
        behind = Trained(0, job, strategy)
        ahead = Trained(1, job, _Interrupted(lambda: None))
        with behind.ps, ahead.ps:
            for _ in range(6):  # three pushes
                ahead.step()
            behind.step()
            behind.step()
            assert behind.ps.last_push is None
            behind.step()
            assert behind.ps.last_push is not None
            assert behind.ps.last_push.outcome == "applied"
    assert len(strategy.gradients) == 3
    total = [sum(each) for each in zip(*strategy.gradients, strict=True)]
    assert deviation(strategy.pushed[-1], total) < FLOAT64_DEVIATION_MAX


def test_a_mode_that_a_strategy_is_not_for_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path) as job:
        worker = Trained(0, job, EASGD(2))
        with worker.ps:
            for _ in range(2):
                worker.step()
            assert "EASGD" not in caplog.text
            job.run(job.coordinator.set_mode(ModeTerms(Mode.ASP), timeout_s=10))
            until = time.monotonic() + 20
            while worker.ps.mode != "asp":
                assert time.monotonic() < until
                time.sleep(0.001)
            for _ in range(4):
                worker.step()
            assert worker.ps.clock == 3
    assert caplog.text.count("EASGD works in a job in mode bsp, and this one is") == 1
