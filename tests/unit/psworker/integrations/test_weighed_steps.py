"""Weights that a framework's steps carry."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from psworker.errors import JobEndedError, JobFailedError, PsError
from psworker.integrations.weighed_steps import SampleCounter, weigh_steps


class Noting(torch.optim.SGD):
    """Notes weights, and ends as it is told."""

    def __init__(self, error: PsError | None = None) -> None:
        super().__init__(nn.Linear(2, 1).parameters(), lr=0.1)
        self.weights: list[float] = []
        self.error = error

    def step(self, closure: Any = None, *, weight: float = 0.0) -> None:  # type: ignore[override]  # noqa: ANN401
        assert closure is None, "shards can't call it"
        if self.error is not None:
            raise self.error
        self.weights.append(weight)


def test_a_step_weighs_as_many_samples_as_came_since_the_last() -> None:
    samples = SampleCounter()
    optimizer = Noting()
    weigh_steps(optimizer, samples.take)
    samples.add(3)
    samples.add(4)
    optimizer.step()
    optimizer.step()  # a second one on the same samples
    optimizer.step(weight=9)
    samples.put(5)
    samples.put(5)  # of the whole step, told with each of its batches
    optimizer.step()
    assert optimizer.weights == [7, 7, 9, 5]


def test_a_batch_that_was_skipped_weighs_nothing() -> None:
    samples = SampleCounter()
    samples.begin(3)
    samples.skip()
    assert samples.take() == 0
    for count in (3, 4, 5):
        samples.begin(count)
        if count != 4:
            samples.reach()
    assert samples.take() == 8
    assert samples.take() == 8  # a second one on the same samples
    samples.begin(2)  # the script returns before it goes backward
    assert samples.take() == 0
    samples.reach()
    samples.reach()  # of another loss of the same batch
    assert samples.take() == 2


def test_without_backward_passes_that_are_seen_all_batches_count() -> None:
    samples = SampleCounter()
    samples.begin(3)
    samples.begin(4)
    assert samples.take() == samples.take() == 7


def test_a_closure_runs_first_and_its_samples_count() -> None:
    samples = SampleCounter()
    optimizer = Noting()
    weigh_steps(optimizer, samples.take)

    def closure() -> float:
        samples.add(6)
        return 0.5

    step: Any = optimizer.step
    assert step(closure) == 0.5
    assert optimizer.weights == [6]


def test_a_scheduler_that_comes_later_finds_what_it_looks_for() -> None:
    optimizer = Noting()
    weigh_steps(optimizer, SampleCounter().take)
    scheduler = StepLR(optimizer, 1)
    optimizer.step()
    setattr(optimizer, "_opt_called", True)  # noqa: B010, as both connections do
    scheduler.step()
    assert optimizer.weights == [1]


def test_the_end_of_a_job_is_told_and_its_failure_is_an_error() -> None:
    told: list[JobEndedError] = []
    optimizer = Noting(JobEndedError("the job is over"))
    weigh_steps(optimizer, SampleCounter().take, told.append)
    optimizer.step()
    assert [str(each) for each in told] == ["the job is over"]
    for error in (JobFailedError("a shard was lost"), PsError("other")):
        optimizer.error = error
        with pytest.raises(type(error)):
            optimizer.step()
    silent = Noting(JobEndedError("the job is over"))
    weigh_steps(silent, SampleCounter().take)
    with pytest.raises(JobEndedError):
        silent.step()
