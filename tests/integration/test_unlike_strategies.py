"""Workers of one job have one strategy, and are told where they have not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psworker
from psserver.edge.checkpoint_interval import CheckpointInterval
from pswire.membership import Mode
from psworker.strategies.strategy import Strategy
from tests.integration.job import Job, connect, run_workers

NEVER = CheckpointInterval(duration_ms=3_600_000)


def _prepared(ps: psworker.Connection, strategy: Strategy | None) -> Callable[[], None]:
    """Joins; a step of the script."""
    model: Any = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = ps.prepare(model, optimizer, strategy=strategy)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()

    return step


STREAMING: dict[str, Any] = {"every": 8, "fragment_count": 2, "taken_after": 1}


@pytest.mark.parametrize(
    ("job_has", "worker_has", "what"),
    [
        (psworker.LocalSteps(2), None, "strategy=LocalSteps(), this worker has no str"),
        (None, psworker.LocalSteps(2), "no strategy, this worker has strategy=LocalS"),
        (psworker.LocalSteps(2), psworker.EASGD(2), "strategy=EASGD()"),
        (
            psworker.FedAvg(2, fraction=0.5),
            psworker.FedAvg(2, fraction=0.5, seed=1),
            "FedAvg(fraction=0.5, seed=0), this worker has strategy=FedAvg(fraction=0.5"
            ", seed=1)",
        ),
        (
            psworker.StreamingDiLoCo(**STREAMING),
            psworker.StreamingDiLoCo(**{**STREAMING, "fragment_count": 1}),
            "strategy=StreamingDiLoCo(fragment_count=2, fragment_order='strided')",
        ),
        (
            psworker.StreamingDiLoCo(**STREAMING),
            psworker.DecoupledDiLoCo(**STREAMING),
            "strategy=DecoupledDiLoCo(fragment_count=2, fragment_order='strided', "
            "fragments_are_drawn=True)",
        ),
        (
            psworker.LocalSteps(2),
            psworker.LocalSteps(2, inner_state="average"),
            "strategy=LocalSteps(inner_state='average')",
        ),
        (
            psworker.DiLoCo(2),
            psworker.DiLoCo(2, lr=0.5, momentum=0.8),
            "the job has the outer optimizer SGD(lr=0.7, momentum=0.9), this worker "
            "has the outer optimizer SGD(lr=0.5, momentum=0.8)",
        ),
        (
            psworker.LocalSteps(2, torch.optim.Adam),
            psworker.LocalSteps(2),
            "optimizer 'outer' is Adam in the job, SGD here",
        ),
    ],
)
def test_a_worker_with_another_strategy_is_refused_at_prepare(
    tmp_path: Path, job_has: Strategy | None, worker_has: Strategy | None, what: str
) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        step = _prepared(ps, job_has)
        step()
        with connect(job, "w1") as other, pytest.raises(psworker.PsError) as caught:
            _prepared(other, worker_has)
        assert what in str(caught.value)
        assert "give all workers" in str(caught.value) or "Adam" in what
        # Not in the job, and nobody waits for it.
        for _ in range(8):
            step()
        assert ps.last_push is not None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (psworker.DiLoCo(2), psworker.DiLoCo(3)),
        (psworker.DiLoCo(2), psworker.DiLoCo(psworker.Growing())),
        (psworker.EASGD(2, beta=0.9), psworker.EASGD(2, beta=0.5)),
        (
            psworker.StreamingDiLoCo(**STREAMING),
            psworker.StreamingDiLoCo(
                **{**STREAMING, "taken_after": 0, "own_share": 0.0}
            ),
        ),
        (
            psworker.FedProx(2, mu=0.1, fraction=1.0),
            psworker.FedProx(3, mu=0.2, fraction=1.0),
        ),
    ],
)
def test_what_is_a_workers_own_may_differ(
    tmp_path: Path, first: Strategy, second: Strategy
) -> None:
    strategies = {"w0": first, "w1": second}

    def work(worker_id: str) -> int:
        with connect(job, worker_id) as ps:
            step = _prepared(ps, strategies[worker_id])
            while ps.clock < 6:
                step()
            assert ps.last_push is not None
            assert ps.last_push.outcome == "applied"
            return ps.clock

    with Job(tmp_path, workers_min=2) as job:
        run_workers({"w0": work, "w1": work})


def test_the_terms_outlive_the_coordinator_and_its_checkpoints(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "mode": Mode.BSP,
        "checkpoint_url": str(tmp_path / "checkpoints"),
        "checkpoint_interval": NEVER,
    }
    other = (psworker.FedAvg(2, fraction=1.0), psworker.DiLoCo(2, lr=0.5))
    with Job(tmp_path / "first", **settings) as job:
        with connect(job, "w0") as ps:
            step = _prepared(ps, psworker.DiLoCo(2))
            for _ in range(4):
                step()
            job.stop_coordinator()
            job.start_coordinator()
            for each in other:
                with connect(job, "w1") as late, pytest.raises(psworker.PsError):
                    _prepared(late, each)
            with connect(job, "w1") as late:
                _prepared(late, psworker.DiLoCo(5))
            step()
            step()
        job.run(job.coordinator.checkpoints.save(30))
    with Job(tmp_path / "second", **settings) as job:
        with connect(job, "w0") as ps, pytest.raises(psworker.PsError) as caught:
            _prepared(ps, other[0])
        assert "goes on from checkpoint" in str(caught.value)
        assert "strategy=DiLoCo(), this worker has strategy=FedAvg" in str(caught.value)
        # With another rate than before, as any script may after a checkpoint; all do.
        with connect(job, "w0") as ps:
            step = _prepared(ps, psworker.DiLoCo(2, lr=0.5))
            for _ in range(4):
                step()
            assert ps.last_push is not None
            with connect(job, "w1") as late, pytest.raises(psworker.PsError) as caught:
                _prepared(late, psworker.DiLoCo(2))
            assert "SGD(lr=0.5), this worker has the outer opt" in str(caught.value)
            with connect(job, "w1") as late:
                _prepared(late, psworker.DiLoCo(2, lr=0.5))
