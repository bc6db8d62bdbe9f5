"""How many local steps a round has: chosen while a job trains, shown and recorded."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import psworker
from pswire.membership import Mode
from psworker.strategies.pace import Growing
from tests.doubles.children import wait_until
from tests.integration.job import Crew, Job, connect, worker_behind


def _prepared(
    ps: psworker.Connection, strategy: psworker.Strategy
) -> torch.optim.Optimizer:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ps.prepare(model, optimizer, strategy=strategy)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer


def test_a_round_that_grows_is_shown_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_HISTORY", f"{tmp_path}/histories/")
    shown = []
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        strategy = psworker.LocalSteps(Growing(first=1, by=1, most=3))
        optimizer = _prepared(ps, strategy)
        for _ in range(9):
            optimizer.step()
            shown.append((worker_behind(ps).work.round_step_count, ps.clock))
    assert shown == [
        *((1, 1), (2, 1), (2, 2), (3, 2), (3, 2), (3, 3), (3, 3), (3, 3), (3, 4)),
    ]
    (history,) = (tmp_path / "histories").glob("worker-w0-*")
    lines = map(json.loads, history.read_text().splitlines())
    rounds = [each for each in lines if each["type"] == "round"]
    assert [(each["clock"], each["steps"]) for each in rounds] == [
        *((1, 1), (2, 2), (3, 3)),
    ]
    assert all(each["worker"] == ["w0", 1] for each in rounds)


def test_what_a_push_waits_for_others_is_no_traffic(tmp_path: Path) -> None:
    waited_s = 0.05

    def first(worker_id: str) -> float:
        with connect(job, worker_id) as ps:
            _prepared(ps, psworker.LocalSteps(1)).step()
            assert ps.last_push is not None
            return ps.last_push.peer_wait_s

    def last(worker_id: str) -> float:
        with connect(job, worker_id) as ps:
            optimizer = _prepared(ps, psworker.LocalSteps(1))
            wait_until(
                lambda: job.ask(lambda: _wait_s(job, "w0")) >= waited_s,
                "the push of w0 has waited",
            )
            optimizer.step()
            assert ps.last_push is not None
            return ps.last_push.peer_wait_s

    with (
        Job(tmp_path, workers_min=2, mode=Mode.BSP) as job,
        Crew({"w0": first, "w1": last}) as crew,
    ):
        found = crew.results()
    assert found["w0"] >= waited_s > found["w1"] == 0


def _wait_s(job: Job, worker_id: str) -> float:
    """How long a worker's pushes have waited for others, on each shard."""
    now_s = time.perf_counter()
    return min(
        member.peers.total_s(now_s)
        for host in job.shards
        for member in host.members
        if member.worker.worker_id == worker_id
    )
