"""What two workers' steps weigh where scripts skip batches or draw them ahead.

Each batch has a gradient of its own, and a size of its own, so that every step shows
which batches it was of.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.job import WAIT_TIMEOUT_S, Job, connect, run_workers

SIZES: Final = (1, 2, 5, 1, 3, 4, 1, 5, 2, 3, 6, 1, 4)
"""Of the batches of an epoch, of which the first worker has one more."""


class Weight(nn.Module):
    """One number; the gradient of a batch is the mean of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return (self.weight * samples).mean()


def numbered() -> DataLoader[Any]:
    """Batches of `SIZES`, whose samples are the numbers of their batch, from 1."""
    numbers = [number for number, size in enumerate(SIZES, 1) for _ in range(size)]
    bounds = torch.arange(len(numbers)).split(list(SIZES))
    return DataLoader(
        TensorDataset(torch.tensor(numbers, dtype=torch.float64)),
        batch_sampler=[each.tolist() for each in bounds],
    )


class Worker:
    """A worker, and where the weight was after each clock that it has stepped in."""

    def __init__(self, ps: psworker.Connection, *, overlap: bool) -> None:
        self.ps = ps
        self.model = Weight()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.model, self.optimizer, self.loader = ps.prepare(
            self.model, self.optimizer, numbered(), overlap=overlap
        )
        self.weights: dict[int, float] = {}

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.weights[self.ps.clock] = self.model.weight.item()


def moves_of(
    train: Callable[[Worker], None], folder: Path, *, overlap: bool = False
) -> list[float]:
    """How far each clock of two workers has moved the weight."""

    def work(worker_id: str) -> dict[int, float]:
        with connect(job, worker_id) as ps:
            worker = Worker(ps, overlap=overlap)
            train(worker)
            return worker.weights

    with Job(folder, workers_min=2) as job:
        first, second = run_workers({"w0": work, "w1": work}).values()
    for clock in first.keys() & second.keys():
        assert first[clock] == second[clock]
    weights = [0.0, *(value for _, value in sorted({**first, **second}.items()))]
    return [before - after for before, after in pairwise(weights)]


Step = Sequence[Sequence[int]]
"""The batches behind one step, of each worker."""


def move_of(step: Step) -> float:
    """What gradients that were accumulated move, weighted by the workers' samples."""
    counts = [sum(SIZES[number - 1] for number in own) for own in step]
    both = zip(counts, map(sum, step), strict=True)
    return sum(count * gradient for count, gradient in both) / sum(counts)


def check(moves: list[float], steps: Iterable[Step]) -> None:
    assert moves == pytest.approx(list(map(move_of, steps)), rel=DEVIATION_MAX)


# Skipped


def refuse(gradient: torch.Tensor) -> None:
    raise RuntimeError("no memory left")


def train_some(worker: Worker, *, every: int) -> None:
    """Goes backward with some batches, and steps after every so many of those."""
    kept = 0
    for (samples,) in worker.loader:
        number = int(samples[0])
        if number in (4, 13):
            continue  # before the model was called
        loss = worker.model(samples)
        if number in (3, 10):
            continue  # a bad loss
        if number in (7, 8):
            (loss if number == 8 else worker.model.weight).register_hook(refuse)
        try:
            loss.backward()
        except RuntimeError:
            worker.model.weight._backward_hooks = None
            worker.optimizer.zero_grad()
            continue
        kept += 1
        if kept % every == 0:
            worker.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_skipped_batches_have_no_weight(tmp_path: Path, *, overlap: bool) -> None:
    """Of one worker only, in all of the usual ways, also the last of an epoch."""

    def train(worker: Worker) -> None:
        for _ in range(2):
            train_some(worker, every=1)
            assert worker.loader.report.skipped == 6

    moves = moves_of(train, tmp_path, overlap=overlap)
    check(moves, 2 * [[[1], [2]], [[5], [6]], [[9], [12]], [[11]]])


@pytest.mark.parametrize("overlap", [False, True])
def test_an_accumulated_step_weighs_what_was_not_skipped(
    tmp_path: Path, *, overlap: bool
) -> None:
    """Also the rest of an epoch, which a step of the next one takes."""

    def train(worker: Worker) -> None:
        for _ in range(2):
            train_some(worker, every=2)

    moves = moves_of(train, tmp_path, overlap=overlap)
    first, last = [[1, 5], [2, 6]], [[9, 11]]
    check(moves, [first, last, [[1, 5], [12, 2, 6]], last])


# Drawn ahead

AHEAD: Final = 3


def ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """Draws some batches before it hands out the first."""
    drawn = deque[Any]()
    for batch in loader:
        drawn.append(batch)
        if len(drawn) > AHEAD:
            yield drawn.popleft()
    yield from drawn


def in_thread(loader: Iterable[Any]) -> Iterator[Any]:
    """Hands out what a thread has drawn, once that has the whole epoch."""
    drawn: queue.Queue[Any] = queue.Queue()

    def draw() -> None:
        for batch in loader:
            drawn.put(batch)
        drawn.put(None)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        while (batch := drawn.get(timeout=WAIT_TIMEOUT_S)) is not None:
            yield batch
    finally:
        thread.join()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefetch", [ahead, in_thread])
def test_batches_drawn_ahead_weigh_their_own_steps(
    tmp_path: Path, prefetch: Callable[[Any], Iterator[Any]], *, overlap: bool
) -> None:
    """Epochs end with a batch of one worker, while the other has no more."""

    def train(worker: Worker) -> None:
        for _ in range(2):
            for (samples,) in prefetch(worker.loader):
                worker.model(samples).backward()
                worker.step()

    moves = moves_of(train, tmp_path, overlap=overlap)
    steps = [[[number], [number + 1]] for number in range(1, 13, 2)]
    check(moves, 2 * [*steps, [[13]]])
