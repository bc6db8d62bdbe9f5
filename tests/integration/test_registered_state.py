"""What a script registers: stored as of a checkpoint's cut, and loaded when it goes on.

Jobs that are killed whole and end as if nothing had happened are in
`tests/fault/test_killed_whole_jobs.py`.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from psserver.coordinator.core.checkpoints import CommittedCheckpoint
from psserver.edge.checkpoint_interval import CheckpointInterval
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.registered_state import decode_states
from pswire.membership import Mode, WorkerState
from psworker.snapshots.exported import exported_state, write_state_dict
from tests.integration.job import Crew, Job, connect
from tests.integration.ones_worker import Worker

BATCH_SIZE = 4
EPOCHS = 3
STEPS_OF_EPOCH = 25
NEVER = CheckpointInterval(duration_ms=3_600_000)


class Counts:
    """Steps of a script, and what it has done at the ends of epochs."""

    def __init__(self) -> None:
        self.steps = 0
        self.ends: tuple[int, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "ends": self.ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.ends = state["steps"], state["ends"]


def job_in(tmp_path: Path, **settings: Any) -> Job:  # noqa: ANN401, as `Job` has them
    settings.setdefault("checkpoint_interval", NEVER)
    return Job(
        tmp_path / "state", checkpoint_url=str(tmp_path / "checkpoints"), **settings
    )


def folder_in(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(str(tmp_path / "checkpoints"))


def states_of(folder: CheckpointFolder, name: str) -> dict[str, Any]:
    assert folder.verify(name) == ()
    data = folder.state(folder.manifest(name))
    return decode_states(data) if data else {}


def prepared(ps: psworker.Connection) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    count = BATCH_SIZE * STEPS_OF_EPOCH * 2
    data = TensorDataset(torch.randn(count, 4))
    made = ps.prepare(model, optimizer, DataLoader(data, batch_size=BATCH_SIZE))
    found: tuple[nn.Module, Any, Any] = made
    return found


def train(
    job: Job,
    worker_id: str,
    counts: Counts,
    after_step: Callable[[int], None] = lambda step: None,
) -> None:
    with connect(job, worker_id) as ps:
        ps.register_state("counts", counts)
        model, optimizer, loader = prepared(ps)
        for epoch in range(ps.epoch, EPOCHS):
            loader.set_epoch(epoch)
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                counts.steps += 1
                after_step(counts.steps)
            counts.ends += (counts.steps,)


def save(job: Job) -> CommittedCheckpoint:
    return job.run(job.coordinator.checkpoints.save(60))


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.ASP])
def test_a_checkpoint_has_the_state_as_of_its_cut(tmp_path: Path, mode: Mode) -> None:
    with job_in(tmp_path, workers_min=2, mode=mode, checkpoint_keep_count=50) as job:
        counts = {name: Counts() for name in "ab"}
        works = dict.fromkeys("ab", lambda name: train(job, name, counts[name]))
        with Crew(works) as crew:
            job.wait_workers(2, WorkerState.MEMBER)
            made = {save(job).name for _ in range(6)}
            crew.results()
        folder = folder_in(tmp_path)
        for name in made & set(folder.names()):
            sequences = {
                worker_id: last
                for worker_id, _, last in folder.manifest(name).job["sequences"]
            }
            if not sequences:
                continue  # both have left
            first = "a" if "a" in sequences else "b"
            found = states_of(folder, name)["counts"]
            assert found["steps"] == sequences[first]
            over = folder.manifest(name).version // (2 * STEPS_OF_EPOCH)
            assert len(found["ends"]) <= over
            if mode is Mode.BSP:
                assert len(found["ends"]) == over


def test_the_last_checkpoint_of_a_job_has_the_state_of_its_end(tmp_path: Path) -> None:
    with job_in(tmp_path, workers_min=1) as job:
        counts = Counts()
        with Crew({"a": lambda name: train(job, name, counts)}) as crew:
            crew.results()
        last = save(job)
    assert last.version == EPOCHS * 2 * STEPS_OF_EPOCH
    folder, expected = folder_in(tmp_path), {"steps": last.version, "ends": counts.ends}
    assert states_of(folder, last.name) == {"counts": expected}
    write_state_dict(
        exported_state(folder, folder.manifest(last.name)), tmp_path / "plain.pt"
    )
    exported = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert exported["registered"] == {"counts": expected}


def test_a_script_that_does_not_go_on_leaves_a_checkpoint_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, is_there = threading.Event(), threading.Event()

    def wait(step: int) -> None:
        if step == 3:
            is_there.set()
            assert goes_on.wait(60)

    with job_in(tmp_path, workers_min=1) as job:
        checkpoints = job.coordinator.core.checkpoints
        with Crew({"a": lambda name: train(job, name, Counts(), wait)}) as crew:
            assert is_there.wait(60)
            checkpoints.state_wait_ms = 200
            without = save(job)
            checkpoints.state_wait_ms = 60_000
            goes_on.set()
            crew.results()
        last = save(job)
        folder = folder_in(tmp_path)
        assert without.version == 3
        assert states_of(folder, without.name) == {}
        assert states_of(folder, last.name)["counts"]["steps"] == last.version
    assert f"checkpoint {without.name} is without what a" in caplog.text


def test_a_coordinator_that_is_started_again_asks_too(tmp_path: Path) -> None:
    with job_in(tmp_path, workers_min=1) as job:
        worker = Worker.of(job, "a")
        with worker.ps:
            counts = Counts()
            worker.ps.register_state("counts", counts)
            worker.step()
            counts.steps = 1
            worker.step()
            job.stop_coordinator()
            job.start_coordinator()
            job.wait_workers(1, WorkerState.MEMBER)
            worker.step()
            job.run(
                job.coordinator.changes.wait_until(
                    lambda: (
                        job.coordinator.core.roster.in_state(WorkerState.MEMBER)[
                            0
                        ].has_state
                    ),
                    30,
                )
            )
            with Crew({"save": lambda _: save(job)}) as crew:
                made = crew_waits(job)
                counts.steps = 3
                worker.step()
                found = crew.results()["save"]
            assert made
            assert states_of(folder_in(tmp_path), found.name)["counts"]["steps"] == 3


def crew_waits(job: Job) -> bool:
    """Returns once a checkpoint waits for registered state."""
    checkpoints = job.coordinator.core.checkpoints

    def waits() -> bool:
        pending = checkpoints.pending
        return pending is not None and pending.state_of is not None

    return job.run(job.coordinator.changes.wait_until(waits, 30))


def test_every_worker_loads_what_the_one_that_led_has_stored(tmp_path: Path) -> None:
    """Before prepare and after it; also one that joins when the job has trained on."""
    with job_in(tmp_path, workers_min=1) as job:
        with Crew({"a": lambda name: train(job, name, Counts())}) as crew:
            crew.results()
        stored = states_of(folder_in(tmp_path), save(job).name)["counts"]
        for worker_id in "bc":
            before, after, other = Counts(), Counts(), Counts()
            with connect(job, worker_id) as ps:
                ps.register_state("counts" if worker_id == "b" else "new", before)
                assert before.steps == 0
                prepared(ps)
                ps.register_state("counts" if worker_id == "c" else "new", after)
                ps.register_state("other", other)
            loaded = before if worker_id == "b" else after
            assert loaded.state_dict() == stored
            assert other.steps == 0


@pytest.mark.parametrize("is_in_job", [False, True])
def test_what_can_not_be_registered_is_refused_by_name(
    tmp_path: Path, is_in_job: bool
) -> None:
    class Odd(Counts):
        def state_dict(self) -> dict[str, Any]:
            return {"log": [1, print]}

    def check(ps: psworker.Connection) -> None:
        with pytest.raises(
            psworker.ConfigurationError,
            match=r"register_state\('own'\): own\.log\[1\] is a builtins\.builtin",
        ):
            ps.register_state("own", Odd())
        with pytest.raises(psworker.ConfigurationError, match=r"has no state_dict\(\)"):
            ps.register_state("own", object())  # type: ignore[arg-type]
        with pytest.raises(psworker.ConfigurationError, match="name of a state"):
            ps.register_state("", Counts())
        ps.register_state("own", Counts())

    if not is_in_job:
        with psworker.connect() as ps:
            check(ps)
        return
    with job_in(tmp_path, workers_min=1) as job, connect(job, "a") as ps:
        check(ps)
