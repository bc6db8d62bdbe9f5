"""psctl against a running job, as a person in another terminal."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.doubles.children import Completed, Nursery
from tests.integration.job import Job, connect


class Running:
    """A job with one worker that has made three steps."""

    def __init__(self, job: Job, model: nn.Module, nursery: Nursery) -> None:
        self.address = job.address
        self.model = model
        self._nursery = nursery

    def psctl(self, *arguments: str, coordinator: str | None = None) -> Completed:
        return self._nursery.run(
            *("-m", "psctl", *arguments),
            environment={"PS_COORDINATOR": coordinator or self.address},
        )


@pytest.fixture(scope="module")
def running(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with (
        Job(tmp_path_factory.mktemp("job"), sockets=True) as job,
        connect(job, "w 0[bold]") as ps,
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        for _ in range(3):
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield Running(job, model, nursery)


def test_status_tells_people_and_programs_the_same(running: Running) -> None:
    text = running.psctl("status")
    assert (text.returncode, text.stderr) == (0, "")
    assert "running, generation 1" in text.stdout
    found = json.loads(running.psctl("status", "--json").stdout)
    assert found["schema_version"] == 2
    assert found["phase"] == "running"
    assert [shard["state"] for shard in found["shards"]] == ["ready", "ready"]
    (worker,) = found["workers"]
    assert worker["worker_id"] == "w 0[bold]"
    assert worker["rank"] == 0
    assert worker["lag"] == 0


def test_a_snapshot_loads_into_the_plain_model(
    running: Running, tmp_path: Path
) -> None:
    out = tmp_path / "model.safetensors"
    done = running.psctl("snapshot", "get", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "version 3 (clock 3) is in" in done.stdout
    assert "asking" in done.stderr
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    plain.load_state_dict(load_file(out), strict=True)
    for mine, theirs in zip(
        plain.parameters(), running.model.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
    listed = json.loads(running.psctl("snapshot", "list", "--json").stdout)
    assert listed["snapshots"] == [{"version": 3}]


def test_a_version_that_does_not_come_is_exit_code_75(
    running: Running, tmp_path: Path
) -> None:
    out = tmp_path / "model.safetensors"
    done = running.psctl(
        *("snapshot", "get", "--out", str(out), "--json"),
        *("--newer-than", "3", "--timeout", "4"),
    )
    assert done.returncode == 75
    assert done.stdout == ""
    assert "no version above 3" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_nothing_there_is_exit_code_69_with_the_cause(running: Running) -> None:
    done = running.psctl("status", coordinator="127.0.0.1:1")
    assert done.returncode == 69
    assert "127.0.0.1:1" in done.stderr
    assert "connection refused" in done.stderr
    assert len(done.stderr.splitlines()) < 5
    debugged = running.psctl("--debug", "status", coordinator="127.0.0.1:1")
    assert debugged.returncode == 69
    assert "Traceback" in debugged.stderr


def test_a_shard_is_not_taken_for_the_coordinator(running: Running) -> None:
    status = json.loads(running.psctl("status", "--json").stdout)
    shard = status["shards"][0]["address"]
    done = running.psctl("status", coordinator=shard)
    assert done.returncode == 69
    assert "not a paramserver coordinator" in done.stderr
