"""Checkpoints of a running job: whole, of one cut, and made when they are due."""

import asyncio
import json
import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from psserver.coordinator.core.checkpoints import STATE_WAIT_MS, CommittedCheckpoint
from psserver.coordinator.rpc.status_report import checkpoint_status, status_message
from psserver.coordinator.storage.saved_job import saved_job_of
from psserver.edge.checkpoint_interval import CheckpointInterval
from psserver.edge.monotonic import now_ms
from psserver.edge.state_folder import StateFolderError
from psserver.shard.tensors.shard_image import PartOfImage
from pswire.checkpoint.errors import CheckpointError, StorageError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import CheckpointName, Manifest, part_name
from pswire.checkpoint.parts import PartKey
from pswire.exit_codes import ExitCode
from pswire.membership import Mode, StepAtomicity, WorkerState
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.children import Nursery
from tests.integration.job import WAIT_TIMEOUT_S, Crew, Job, connect
from tests.integration.ones_worker import Worker
from tests.integration.processes import Processes
from tests.integration.test_mode_cli import psctl
from tests.refusals import refused

BATCH_SIZE = 4
SAMPLE_COUNT = 400
NEVER = CheckpointInterval(duration_ms=3_600_000)

KINDS: dict[str, dict[str, Any]] = {
    "bsp": {},
    "ssp": {"mode": Mode.SSP, "staleness_bound": 2},
    "asp": {"mode": Mode.ASP},
    "two phases": {"step_atomicity": StepAtomicity.CLOCK},
    "asp in two phases": {"mode": Mode.ASP, "step_atomicity": StepAtomicity.CLOCK},
    "clipped": {"clip_grad_norm": 0.1},
    "backup workers": {
        "backup_worker_count": 1,
        "step_atomicity": StepAtomicity.CLOCK,
    },
}


def job_in(tmp_path: Path, **settings: Any) -> Job:  # noqa: ANN401, as `Job` has them
    settings.setdefault("checkpoint_interval", NEVER)
    settings.setdefault("workers_min", 2)
    return Job(
        tmp_path / "state", checkpoint_url=str(tmp_path / "checkpoints"), **settings
    )


def folder_in(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(str(tmp_path / "checkpoints"))


def train(
    job: Job,
    worker_id: str,
    clip_grad_norm: float | None,
    after_step: Callable[[int], object] = lambda _: None,
) -> None:
    """One epoch of a small model."""
    with connect(job, worker_id) as ps:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 200), nn.Linear(200, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(SAMPLE_COUNT, 8))
        loader: Any = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
        options: Any = {}
        if clip_grad_norm is not None:
            options["clip_grad_norm"] = clip_grad_norm
        model, optimizer, loader = ps.prepare(model, optimizer, loader, **options)
        for (inputs,) in loader:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(ps.clock)


def save(job: Job) -> CommittedCheckpoint:
    return job.run(job.coordinator.checkpoints.save(30))


def wait_newest(job: Job, *, above: int = 0) -> CommittedCheckpoint:
    """The newest checkpoint, once there is one above this version."""
    checkpoints = job.coordinator.core.checkpoints

    def is_there() -> bool:
        newest = checkpoints.newest
        return newest is not None and newest.version > above

    reached = job.run(job.coordinator.changes.wait_until(is_there, WAIT_TIMEOUT_S / 2))
    assert reached, f"no checkpoint: {checkpoints.failure}"
    assert checkpoints.newest is not None
    return checkpoints.newest


def check_one_cut(folder: CheckpointFolder, name: str) -> Manifest:
    """Every file is as it was written, and all are of one cut."""
    assert folder.verify(name) == ()
    manifest = folder.manifest(name)
    lasts = {
        (worker_id, incarnation): last
        for worker_id, incarnation, last in manifest.job["sequences"]
    }
    for part in manifest.parts:
        with folder.open_part(name, part) as file:
            windows = PartOfImage(file).core.windows
        done = {tuple(each.worker): each.done_sequence for each in windows}
        for worker, last in lasts.items():
            # A push that backup workers make too late never comes to be done.
            late = done[worker] < last and manifest.mode is Mode.BSP
            assert done[worker] == last or late, f"{part.name} is of another cut"
    return manifest


def check_values(job: Job, folder: CheckpointFolder, manifest: Manifest) -> None:
    """The parts hold what the shards hold, which has not changed since."""
    for host, part in zip(job.shards, manifest.parts, strict=True):
        with folder.open_part(manifest.name, part) as file:
            for chunk in host.model.chunks:
                image = job.ask(
                    lambda host=host, chunk=chunk: host.model.engine.image_of(  # type: ignore[misc]
                        chunk.index
                    )
                )
                saved = file.tensor(PartKey.value(chunk.index).text)
                assert torch.equal(saved, image.values)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_made_while_a_job_trains_are_each_of_one_cut(
    tmp_path: Path, kind: str
) -> None:
    settings = dict(KINDS[kind])
    clip_grad_norm = settings.pop("clip_grad_norm", None)
    with job_in(tmp_path, **settings) as job:
        folder = folder_in(tmp_path)
        works = dict.fromkeys("ab", lambda name: train(job, name, clip_grad_norm))
        with Crew(works) as crew:
            job.wait_workers(2, WorkerState.MEMBER)
            made = [save(job) for _ in range(4)]
            crew.results()
        last = save(job)

        # The oldest are deleted once newer ones were read back.
        for each in {each.name: each for each in made[-2:]}.values():
            manifest = check_one_cut(folder, each.name)
            saved = saved_job_of(manifest, folder.url)
            consumed_count = sum(epoch.consumed_count for epoch in saved.epochs)
            if kind != "backup workers":  # which drop what comes too late
                assert consumed_count == BATCH_SIZE * manifest.version
        manifest = check_one_cut(folder, last.name)
        check_values(job, folder, manifest)
        with psworker.SnapshotReader(job.address) as reader:
            snapshot = reader.latest()
        assert (manifest.version, manifest.clock) == (snapshot.version, snapshot.clock)
        (epoch,) = saved_job_of(manifest, folder.url).epochs
        assert epoch.is_closed


def test_one_is_made_every_so_many_steps_and_so_many_stay(tmp_path: Path) -> None:
    with job_in(
        tmp_path,
        checkpoint_interval=CheckpointInterval(step_count=1),
        checkpoint_keep_count=1,
    ) as job:
        made = []

        def hold(clock: int) -> None:
            if clock in (10, 20):
                made.append(wait_newest(job, above=2 * (clock - 10)).version)

        works = dict.fromkeys("ab", lambda name: train(job, name, None, hold))
        with Crew(works) as crew:
            crew.results()
        assert len(set(made)) > 1, "it was made while workers trained"
        newest = wait_newest(job, above=99)
        status = status_message(job.coordinator.core, job.coordinator.waits, now_ms())
        assert status.checkpoints.newest.place.name == newest.name
    folder = folder_in(tmp_path)
    assert folder.names()[-1] == str(CheckpointName(2 * 50))
    assert len(folder.names()) <= 2, "the last one may not be read back yet"


def test_a_job_that_has_not_changed_gives_the_newest_one_again(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        with Crew(dict.fromkeys("ab", lambda name: train(job, name, None))) as crew:
            crew.results()
        last = wait_newest(job)
        assert save(job) is last
        assert folder_in(tmp_path).names() == (last.name,)


def test_a_coordinator_that_is_started_again_knows_the_newest_one(
    tmp_path: Path,
) -> None:
    with job_in(tmp_path) as job:
        with Crew(dict.fromkeys("ab", lambda name: train(job, name, None))) as crew:
            crew.results()
        last = wait_newest(job)
        job.stop_coordinator()
        assert folder_in(tmp_path).names() == (last.name,), "nothing has changed"
        job.start_coordinator()
        known = job.coordinator.core.checkpoints.newest
        assert known is not None
        assert (known.name, known.version) == (last.name, last.version)


def test_a_coordinator_that_ends_makes_a_last_one(tmp_path: Path) -> None:
    with job_in(tmp_path, workers_min=1) as job:
        worker = Worker.of(job, "a")
        with worker.ps:
            worker.step()
            job.stop_coordinator()
            (name,) = folder_in(tmp_path).names()
            manifest = check_one_cut(folder_in(tmp_path), name)
            assert manifest.version == 1
            job.start_coordinator()
            job.wait_workers(1, WorkerState.MEMBER)


def test_a_folder_that_another_job_uses_is_refused(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        with Crew(dict.fromkeys("ab", lambda name: train(job, name, None))) as crew:
            crew.results()
        wait_newest(job)
        with (
            pytest.raises(StateFolderError, match="the job you want, it runs already"),
            Job(tmp_path / "other", checkpoint_url=str(tmp_path / "checkpoints")),
        ):
            raise AssertionError("it has started")
    with Job(tmp_path / "other"):
        pass
    with (
        pytest.raises(StateFolderError, match="and the checkpoints are of job"),
        Job(tmp_path / "other", checkpoint_url=str(tmp_path / "checkpoints")),
    ):
        raise AssertionError("it has started")


def test_a_folder_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="checkpoints"), job_in(tmp_path):
        raise AssertionError("it has started")


def test_what_a_shard_can_not_write_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_in(tmp_path, workers_min=1) as job:
        worker = Worker.of(job, "a")
        with worker.ps:
            worker.step()
            first = save(job)
            worker.step()

            def full(*_: object) -> None:
                raise StorageError("No space left on device")

            with monkeypatch.context() as patch:
                patch.setattr(CheckpointFolder, "write_part", full)
                with pytest.raises(Refusal, match="No space left on device") as caught:
                    save(job)
            assert caught.value.reason is ErrorReason.CHECKPOINT_FAILED
            assert job.coordinator.core.checkpoints.newest is first
            assert folder_in(tmp_path).verify(first.name) == ()
            newest = folder_in(tmp_path).newest_good().manifest
            assert newest is not None
            assert newest.name == first.name
            # And training, and saving, go on. One shard may fail after the other.
            while None in [job.ask(each.checkpoints.make_room) for each in job.shards]:
                pass
            worker.step()
            second = save(job)
            assert second.version == 3
            check_one_cut(folder_in(tmp_path), second.name)


def test_a_second_coordinator_of_the_job_takes_the_folder_over(tmp_path: Path) -> None:
    with job_in(tmp_path, workers_min=1) as job:
        worker = Worker.of(job, "a")
        with worker.ps:
            worker.step()
            job_id = job.coordinator.core.settings.job_id
            folder_in(tmp_path).claim(job_id, "another process")
            with refused(ErrorReason.CHECKPOINT_FAILED, "another coordinator, of job"):
                save(job)
            assert folder_in(tmp_path).names() == (), "no shard has written anything"


def test_a_checkpoint_is_made_by_command(nursery: Nursery, tmp_path: Path) -> None:
    with job_in(tmp_path, workers_min=1, sockets=True) as job:
        before = psctl(nursery, job, "checkpoint", "save")
        assert before.returncode == ExitCode.TRY_AGAIN
        assert "there are no values yet" in before.stderr
        worker = Worker.of(job, "a")
        with worker.ps:
            worker.step()
            done = psctl(nursery, job, "checkpoint", "save", "--json")
            assert done.returncode == 0, done.stderr
            saved = json.loads(done.stdout)
            assert (saved["name"], saved["version"]) == ("step-000000000001", 1)
            assert saved["url"] == str(tmp_path / "checkpoints")
            check_one_cut(folder_in(tmp_path), saved["name"])
            again = psctl(nursery, job, "checkpoint", "save")
            assert again.stdout.startswith("step-000000000001 (version 1, clock 1, ")
            shown = psctl(nursery, job, "status")
            assert "checkpoint  version 1, " in shown.stdout


@pytest.mark.parametrize("hanging", ["commit", "prune"])
def test_a_folder_that_hangs_is_named_and_keeps_no_coordinator_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    hangs, ended = threading.Event(), threading.Event()
    saver = "psserver.coordinator.host.checkpoint_saver"
    monkeypatch.setattr(f"{saver}.LAST_CHECKPOINT_S", 1.0)
    monkeypatch.setattr("psserver.coordinator.core.checkpoints.SLOW_MS", 1)
    write = CheckpointFolder.commit if hanging == "commit" else CheckpointFolder.prune

    def hang(folder: CheckpointFolder, *arguments: Any) -> object:  # noqa: ANN401, either
        hangs.set()
        ended.wait()
        return write(folder, *arguments)

    monkeypatch.setattr(CheckpointFolder, hanging, hang)
    try:
        with job_in(tmp_path, workers_min=1) as job:
            worker = Worker.of(job, "a")
            with worker.ps:
                worker.step()
                core = job.coordinator.core
                if hanging == "commit":
                    with pytest.raises(Refusal, match="no checkpoint within"):
                        job.run(job.coordinator.checkpoints.save(1.0))
                    assert hangs.wait(WAIT_TIMEOUT_S)
                    status = job.ask(
                        lambda: checkpoint_status(core.checkpoints, now_ms())
                    )
                    assert "for its folder to take the manifest" in status.failure
                else:
                    save(job)
                    assert hangs.wait(WAIT_TIMEOUT_S)
                job.stop_coordinator()
                names = folder_in(tmp_path).names()
                assert len(names) == 1
                assert folder_in(tmp_path).is_complete(names[0]) == (hanging == "prune")
                ended.set()
                job.start_coordinator()
                job.wait_workers(1, WorkerState.MEMBER)
    finally:
        ended.set()


def test_a_running_job_returns_to_a_checkpoint_by_command(
    nursery: Nursery, tmp_path: Path
) -> None:
    """In the same processes; what is newer counts no more, and goes with the next."""
    restore = ("checkpoint", "restore", "--json")
    with job_in(tmp_path, workers_min=1, checkpoint_keep_count=3, sockets=True) as job:
        assert psctl(nursery, job, *restore).returncode == ExitCode.TRY_AGAIN
        worker = Worker.of(job, "a")
        with worker.ps:
            names = []
            for _ in range(3):
                worker.step()
                worker.step()
                names.append(save(job).name)
            worker.step()
            folder = folder_in(tmp_path)
            job.run(job.coordinator.checkpoints.pruned())
            shards = job.coordinator.core.shards  # each reports every second
            known = job.coordinator.changes.wait_until(lambda: shards.version >= 7, 60)
            assert job.run(known)
            damaged = tmp_path / "checkpoints" / names[2] / part_name(0, 2)
            damaged.write_bytes(b"")
            refused = psctl(nursery, job, *restore, names[2], "--yes")
            assert refused.returncode == ExitCode.TRY_AGAIN
            assert f"{names[2]}/{damaged.name}" in refused.stderr

            newest = json.loads(psctl(nursery, job, *restore).stdout)
            assert newest["name"] == names[1]
            assert newest["lost_step_count"] == 3
            planned = json.loads(psctl(nursery, job, *restore, names[0]).stdout)
            assert (planned["name"], planned["is_done"]) == (names[0], False)
            assert planned["lost_step_count"] == 5
            assert planned["undone"] == names[1:]
            assert folder.names() == tuple(names)
            assert worker.step().outcome == "applied"
            assert worker.value == -8

            done = json.loads(psctl(nursery, job, *restore, names[0], "--yes").stdout)
            assert done["is_done"]
            assert folder.names() == (names[0],)
            # A step more may be taken by shards that have not heard yet.
            while worker.step().outcome != "applied" or worker.ps.clock > 3:
                pass
            assert (worker.value, worker.ps.clock) == (-3, 3)
            assert job.coordinator.core.way_back is not None
            assert job.coordinator.core.way_back.point.place.name == names[0]

            saved = save(job)
            assert (saved.name, saved.version) == (str(CheckpointName(3)), 3)
            assert job.run(
                job.coordinator.changes.wait_until(
                    lambda: folder.undone() == (), WAIT_TIMEOUT_S / 2
                )
            )
            assert folder.names() == (names[0], saved.name)
            assert worker.step().outcome == "applied"


def test_a_local_job_that_is_ended_makes_a_last_one(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start_daemon(
            "local",
            "local",
            *("--listen=127.0.0.1:0", "--shards=2"),
            f"--checkpoint-dir={tmp_path / 'checkpoints'}",
        )
        address = processes.address("local")
        with psworker.connect(address, "a") as ps:
            model = nn.ParameterList([torch.zeros(2_000)])
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            model, optimizer = ps.prepare(model, optimizer)
            for _ in range(3):
                model[0].grad = torch.ones(2_000)
                optimizer.step()
            processes.send("local", signal.SIGTERM)
            assert processes.code("local") == 0
            with suppress(psworker.PsError):
                ps.close()
        (name,) = folder_in(tmp_path).names()
        assert check_one_cut(folder_in(tmp_path), name).version == 3
        assert "is complete: version 3, clock 3" in processes.log("local")


def test_a_shard_that_is_ended_asks_for_a_last_one(tmp_path: Path) -> None:
    """What it holds is nowhere else, and its coordinator goes on."""
    with job_in(tmp_path, workers_min=1) as job:
        worker = Worker.of(job, "a")
        for _ in range(3):
            worker.step()
        before = folder_in(tmp_path).names()
        job.end_shard(0, drains=True)
        (made,) = set(folder_in(tmp_path).names()) - set(before)
        assert check_one_cut(folder_in(tmp_path), made).version == 3
        with suppress(psworker.PsError):
            worker.ps.close()


def test_a_shard_that_ends_after_its_coordinator_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when all are stopped: the coordinator has made a last checkpoint."""
    caplog.set_level(logging.INFO, "psserver.shard")
    with job_in(tmp_path, workers_min=1) as job:
        worker = Worker.of(job, "a")
        worker.step()
        job.stop_coordinator()
        job.end_shard(0, drains=True)
        assert (
            "the coordinator has ended before this shard, which asks nobody for a last "
            "checkpoint" in caplog.messages
        )
        assert "for 0 s" not in caplog.text
        assert "Cancelling" not in caplog.text
        job.start_coordinator()
        with suppress(psworker.PsError):
            worker.ps.close()


def test_shards_that_end_together_leave_the_wait_for_state_as_it_was(
    tmp_path: Path,
) -> None:
    """Else all later checkpoints would go without the state of a slow script."""
    with job_in(tmp_path, workers_min=1) as job:
        worker = Worker.of(job, "a")
        worker.step()
        saver = job.coordinator.checkpoints

        async def end_both() -> None:
            await asyncio.gather(saver.save_last(), saver.save_last())

        job.run(end_both())
        assert job.coordinator.core.checkpoints.state_wait_ms == STATE_WAIT_MS
        worker.ps.close()
