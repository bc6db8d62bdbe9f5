"""Mistakes of people, end to end: what they read, and that nobody else is harmed."""

import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psworker
from pswire.addresses import Address
from tests.doubles.free_addresses import free_address
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.job import (
    WAIT_TIMEOUT_S,
    Crew,
    Job,
    connect,
    deviation,
    run_workers,
)


class Layer(nn.Module):
    """A weight and a bias, and whatever else a test wants."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def good_model() -> nn.Module:
    return Layer(weight=torch.ones(4, 3), bias=torch.ones(4), last=torch.ones(2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()


def refusal_at_prepare(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> psworker.PsError:
    """How a second worker with these is refused, while the first one goes on."""
    with Job(folder) as job, connect(job, "first") as first:
        good = good_model()
        good, good_optimizer = first.prepare(good, sgd(good))
        with (
            connect(job, "second") as second,
            pytest.raises(psworker.PsError) as caught,
        ):
            second.prepare(model, optimizer)
        step(good, good_optimizer, 1.0)
        assert first.clock == 1
        assert first.generation == 1
    assert "Traceback" not in str(caught.value)
    assert_told_once(caught.value)
    return caught.value


def assert_told_once(error: BaseException) -> None:
    """Checks that nothing of gRPC stands before what a person is to read."""
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Traceback (most recent call last)") == 1, shown


def test_another_model_is_told_as_a_difference_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Layer(
        weight=torch.ones(4, 5), bias=torch.ones(4).double(), extra=torch.ones(1)
    )
    error = refusal_at_prepare(tmp_path, other, sgd(other))
    assert isinstance(error, psworker.SchemaMismatchError)
    lines = str(error).splitlines()
    assert lines[1:5] == [
        "  ! model.weight: parameter [4, 3] float32 in the job, "
        "parameter [4, 5] float32 here",
        "  ! model.bias: parameter [4] float32 in the job, parameter [4] float64 here",
        "  - model.last: parameter [2] float32 (only in the job)",
        "  + model.extra: parameter [1] float32 (only here); "
        "build the same model on every worker",
    ]
    # The others wait for this worker, and its own terminal may be far away.
    assert [
        each.getMessage() for each in caplog.records if "not taken" in each.msg
    ] == [
        "second/1 was not taken into the job: this worker's model differs from the "
        "job's"
    ]


def test_a_wrong_model_that_never_trained_stands_in_nobodys_way(tmp_path: Path) -> None:
    """A script that was corrected and started again."""
    wrong = nn.Linear(2, 2)
    with Job(tmp_path, workers_min=2) as job:
        with (
            connect(job, "w0", start_timeout_s=0.5) as ps,
            pytest.raises(psworker.StartTimeoutError),
        ):
            ps.prepare(wrong, sgd(wrong))

        def work(worker_id: str) -> int:
            model = good_model()
            with connect(job, worker_id) as ps:
                model, optimizer = ps.prepare(model, sgd(model))
                step(model, optimizer, 1.0)
                return ps.clock

        assert run_workers({"w0": work, "w1": work}) == {"w0": 1, "w1": 1}


def test_another_optimizer_is_told(tmp_path: Path) -> None:
    model = good_model()
    error = refusal_at_prepare(tmp_path, model, torch.optim.Adam(model.parameters()))
    assert isinstance(error, psworker.OptimizerMismatchError)
    assert "'optimizer' is SGD in the job, Adam here" in str(error)


class OwnSGD(torch.optim.Optimizer):
    """Another class of a name that shards know."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})


OwnSGD.__name__ = "SGD"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda parameters: torch.optim.LBFGS(parameters), "LBFGS"),
        (lambda parameters: torch.optim.Rprop(parameters), "Rprop"),
        (lambda parameters: OwnSGD(parameters, lr=0.1), "test_errors.SGD"),
    ],
    ids=["LBFGS", "Rprop", "own class"],
)
def test_an_optimizer_that_shards_cant_run_is_refused_with_those_they_can(
    make: Any,  # noqa: ANN401
    name: str,
    tmp_path: Path,
) -> None:
    """Before anything is sent: the job takes its model from the next worker."""
    with Job(tmp_path) as job:
        with connect(job, "w0") as ps:
            model = good_model()
            with pytest.raises(psworker.OptimizerUnsupportedError) as caught:
                ps.prepare(model, make(model.parameters()))
        text = str(caught.value)
        assert name in text
        assert "supported are SGD, Adam, AdamW, Adagrad" in text
        assert job.ask(lambda: job.coordinator.core.model.schema) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_skips_the_clock_for_all(
    bad: float, tmp_path: Path
) -> None:
    """Adam's step counts and momentum stay as they were, as after GradScaler's skip."""

    def work(worker_id: str) -> tuple[list[bool], list[torch.Tensor]]:
        model = good_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        skipped = []
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(model, optimizer)
            for clock in range(1, 7):
                before = [each.detach().clone() for each in model.parameters()]
                is_bad = clock in (2, 5) and worker_id == "w1"
                step(model, optimizer, bad if is_bad else 1.0)
                push = ps.last_push
                assert push is not None
                skipped.append(push.skipped)
                if push.skipped:
                    assert push.nonfinite_worker_ids == ("w1",)
                    for old, new in zip(before, model.parameters(), strict=True):
                        assert torch.equal(old, new)
                assert ps.clock == clock
        return skipped, [each.detach().clone() for each in model.parameters()]

    with Job(tmp_path, workers_min=3) as job:
        results = run_workers(dict.fromkeys(("w0", "w1", "w2"), work))
        assert job.step_counts(0) == {4}

    model = good_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(4):
        step(model, optimizer, 1.0)
    for skipped, values in results.values():
        assert skipped == [False, True, False, False, True, False]
        exact = [each.detach() for each in model.parameters()]
        assert deviation(values, exact) <= DEVIATION_MAX


def test_a_lost_shard_is_named_to_every_worker_that_waits(tmp_path: Path) -> None:
    ready = threading.Barrier(3)

    def train_for_ever(worker_id: str) -> None:
        model = good_model()
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(model, sgd(model))
            step(model, optimizer, 1.0)
            ready.wait(WAIT_TIMEOUT_S)
            while True:
                step(model, optimizer, 1.0)

    def work(worker_id: str) -> str:
        with pytest.raises(psworker.JobFailedError) as caught:
            train_for_ever(worker_id)
        assert_told_once(caught.value)
        return str(caught.value)

    with Job(tmp_path, shard_count=3, workers_min=2, lease_ttl_ms=4000) as job:
        works = dict.fromkeys(("w0", "w1"), work)
        with Crew(works) as crew:
            ready.wait(WAIT_TIMEOUT_S)
            job.end_shard(2)
            texts = crew.results()
        # A late worker hears the same, at once.
        with pytest.raises(psworker.PsError, match=r"shard 2 at .* was lost"):
            connect(job, "late")
    for text in texts.values():
        assert "shard 2 at 127." in text
        assert "was lost" in text


def test_a_shard_that_workers_cant_reach_ends_the_wait_for_the_start(
    tmp_path: Path,
) -> None:
    """Such as one that advertises an address of another network."""

    def nowhere(address: Address) -> Address:
        return free_address()

    with Job(tmp_path, advertise={0: nowhere}) as job:
        model = good_model()
        with (
            connect(job, "w0", start_timeout_s=4) as ps,
            pytest.raises(psworker.StartTimeoutError) as caught,
        ):
            ps.prepare(model, sgd(model))
    assert_told_once(caught.value)
    text = str(caught.value)
    assert "shard 0 at 127.0.0.1:" in text
    assert "could not write the first values" in text
