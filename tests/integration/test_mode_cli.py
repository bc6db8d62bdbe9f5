"""psctl mode against a running job, and what psctl status tells after it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import psworker
from psserver.coordinator.core.shard_map import ShardStanding
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from pswire.membership import Mode, ModeTerms, Record
from pswire.reasons import Refusal
from tests.doubles.children import Completed, Nursery
from tests.integration.job import WAIT_TIMEOUT_S, Job, connect


def psctl(nursery: Nursery, job: Job, *arguments: str) -> Completed:
    return nursery.run(
        *("-m", "psctl", *arguments), environment={"PS_COORDINATOR": job.address}
    )


def step(
    ps: psworker.Connection, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    clock = ps.clock
    while ps.clock < clock + 5:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def wait_told(job: Job, version: int) -> list[ShardStanding]:
    """What the shards tell once they stand at a version."""
    slots = job.coordinator.core.shards.slots
    assert job.run(
        job.coordinator.changes.wait_until(
            lambda: all(
                slot.standing.version == version and not slot.standing.queued_push_count
                for slot in slots
            ),
            WAIT_TIMEOUT_S / 2,
        )
    )
    return job.ask(lambda: [slot.standing for slot in slots])


def test_the_mode_changes_by_command_and_the_status_says_so(
    nursery: Nursery, tmp_path: Path
) -> None:
    with Job(tmp_path, sockets=True) as job, connect(job, "w0") as ps:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        step(ps, model, optimizer)

        done = psctl(nursery, job, "mode", "ssp", "--staleness", "2")
        assert done.returncode == 0
        assert "divide the learning rate by N" in done.stderr
        assert done.stdout.startswith("ssp, at most 2 clocks apart, after clock 5")
        step(ps, model, optimizer)
        again = psctl(nursery, job, "mode", "ssp", "--staleness", "2", "--json")
        changed = json.loads(again.stdout)
        assert (changed["mode_clock"], changed["generation"]) == (5, 2)
        done = psctl(nursery, job, "mode", "asp", "--json")
        assert done.stderr == ""
        asp = json.loads(done.stdout)
        assert asp["previous_mode"] == "ssp"
        assert (asp["generation"], asp["staleness_bound"]) == (3, None)
        step(ps, model, optimizer)
        told = wait_told(job, 15)

        done = psctl(nursery, job, "status", "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)

    assert (found["mode"], found["generation"]) == ("asp", 3)
    (worker,) = found["workers"]
    assert (worker["clock"], worker["lead"], worker["lag"]) == (15, 0, 0)
    assert [shard["frontier"] for shard in found["shards"]] == [15, 15]
    assert [shard["queued_push_count"] for shard in found["shards"]] == [0, 0]
    # The pushes of SSP and ASP; each came from the values that it found.
    for shard, standing in zip(found["shards"], told, strict=True):
        assert shard["staleness_counts"] == [10]
        assert standing.staleness_counts[0] == sum(standing.staleness_counts) == 10


def test_who_asks_for_a_mode_is_told_that_somebody_else_wants_another(
    tmp_path: Path,
) -> None:
    async def ask_both(
        host: CoordinatorHost,
    ) -> tuple[Record | BaseException, Record | BaseException]:
        return await asyncio.gather(
            host.set_mode(ModeTerms(Mode.ASP, 0), WAIT_TIMEOUT_S),
            host.set_mode(ModeTerms(Mode.SSP, 2), WAIT_TIMEOUT_S),
            return_exceptions=True,
        )

    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = nn.Linear(4, 3)
        ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        first, second = job.run(ask_both(job.coordinator))

    assert isinstance(first, Refusal)
    since = "somebody has asked for ssp, at most 2 clocks apart since"
    assert since in first.message
    assert isinstance(second, Record)
    assert (second.mode, second.staleness_bound) == (Mode.SSP, 2)


def test_before_the_start_the_command_says_whom_the_job_waits_for(
    nursery: Nursery, tmp_path: Path
) -> None:
    with Job(tmp_path, workers_min=2, sockets=True) as job:
        done = psctl(nursery, job, "mode", "asp")
    assert done.returncode == 75
    assert "2 more workers to call prepare() (0 of 2 have)" in done.stderr
    assert "Traceback" not in done.stderr
