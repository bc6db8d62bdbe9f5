"""A job that returns to a checkpoint in processes that live on.

With real processes: `tests/fault/test_killed_whole_jobs.py`.
"""

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.torch_types import bytes_of
from tests.integration.host_processes import run_group
from tests.integration.job import Crew, Job, connect
from tests.integration.test_checkpoints import job_in, save
from tests.integration.test_registered_state import Counts, crew_waits

BATCH_SIZE = 4
STEPS_OF_EPOCH = 5
EPOCHS = 3
WORKERS = ("a", "b")
ONE_AFTER_THE_OTHER = threading.Lock()
"""Of workers that are threads and share torch's random numbers."""


def digest(tensors: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + bytes(bytes_of(tensors[name].detach())))
    return found.hexdigest()


def scheduled(optimizer: Any, by: str) -> lr_scheduler.LRScheduler:  # noqa: ANN401
    """A scheduler that is stepped with each batch, or with each epoch."""
    if by == "batch":
        total = STEPS_OF_EPOCH * EPOCHS
        return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total + 1)
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def train(
    job: Job,
    worker_id: str,
    by: str,
    after_step: Callable[[str, int], object] = lambda *_: None,
) -> dict[str, Any]:
    """Trains with what a script has; what it has at the end."""
    rewinds: list[psworker.Rewind] = []
    counts = Counts()
    with connect(job, worker_id) as ps:
        with ONE_AFTER_THE_OTHER:
            torch.manual_seed(0)
            layers = nn.Linear(8, 20), nn.BatchNorm1d(20), nn.Linear(20, 2)
            inputs = torch.randn(BATCH_SIZE * STEPS_OF_EPOCH * len(WORKERS), 8)
        model: Any = nn.Sequential(*layers)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        data = TensorDataset(inputs)
        loader: Any = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        model, optimizer, loader, scheduler, scaler = ps.prepare(
            model, optimizer, loader, scheduled(optimizer, by), scaler, buffers="mean"
        )
        ps.register_state("counts", counts)
        ps.on_rewind(rewinds.append)
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            for (batch,) in loader:
                optimizer.zero_grad()
                scaler.scale(model(batch).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                if by == "batch":
                    scheduler.step()
                counts.steps += 1
                after_step(worker_id, counts.steps)
            if by == "epoch":
                scheduler.step()
        state = optimizer.state_dict()["state"]
        return {
            "model": digest(model.state_dict()),
            "state": digest(
                {f"{n}/{key}": each for n in state for key, each in state[n].items()}
            ),
            "rate": optimizer.param_groups[0]["lr"],
            "scaler": scaler.state_dict(),
            "steps": counts.steps,
            "scheduler": scheduler.last_epoch,
            "rewinds": rewinds,
        }


@pytest.mark.parametrize(
    ("by", "saved_at", "lost_at"),
    [("batch", 7, 9), ("epoch", STEPS_OF_EPOCH, 12)],
)
def test_a_job_that_loses_a_shard_ends_as_if_it_had_not(
    tmp_path: Path, by: str, saved_at: int, lost_at: int
) -> None:
    """In the middle of an epoch, and from the end of one over that of the next."""
    with job_in(tmp_path / "one", job_seed=5) as job:
        works = dict.fromkeys(WORKERS, lambda name: train(job, name, by))
        with Crew(works) as crew:
            expected = crew.results()
    with (
        job_in(tmp_path / "two", job_seed=5, lease_ttl_ms=2_000) as job,
        ThreadPoolExecutor(1) as saver,
    ):
        saving: list[Future[Any]] = []
        done = {("b", step) for step in range(EPOCHS * STEPS_OF_EPOCH + 1)}

        def disturb(worker_id: str, step: int) -> None:
            if (worker_id, step) in done:
                return
            done.add((worker_id, step))
            if step == saved_at:
                saving.append(saver.submit(save, job))
                # It is cut before the next step.
                assert crew_waits(job)
            elif step == lost_at:
                saving[0].result(30)
                job.replace_shard(1)

        works = dict.fromkeys(WORKERS, lambda name: train(job, name, by, disturb))
        with Crew(works) as crew:
            found = crew.results()
    for name in WORKERS:
        (rewind,) = found[name]["rewinds"]
        assert found[name] == {**expected[name], "rewinds": [rewind]}
        assert saved_at <= rewind.to_clock < lost_at <= rewind.from_clock + 1
        assert rewind.to_epoch == rewind.to_clock // STEPS_OF_EPOCH
        assert rewind.from_epoch == lost_at // STEPS_OF_EPOCH


def train_gan(
    job: Job, worker_id: str, at_batch: Callable[[str, int], object] = lambda *_: None
) -> tuple[str, int]:
    """Two optimizers that step on each batch; a digest of the models, and the clock."""
    with connect(job, worker_id) as ps:
        with ONE_AFTER_THE_OTHER:
            torch.manual_seed(0)
            maker: Any = nn.Linear(8, 8)
            critic: Any = nn.Linear(8, 1)
            inputs = torch.randn(BATCH_SIZE * STEPS_OF_EPOCH * len(WORKERS), 8)
        by_maker: Any = torch.optim.Adam(maker.parameters(), lr=0.01)
        by_critic: Any = torch.optim.Adam(critic.parameters(), lr=0.01)
        loader: Any = DataLoader(TensorDataset(inputs), batch_size=BATCH_SIZE)
        maker, critic, by_maker, by_critic, loader = ps.prepare(
            maker, critic, by_maker, by_critic, loader
        )
        count = 0
        for _ in range(EPOCHS):
            for (real,) in loader:
                count += 1
                at_batch(worker_id, count)
                by_critic.zero_grad()
                made = maker(real)
                (critic(made.detach()).mean() - critic(real).mean()).backward()
                by_critic.step()
                by_maker.zero_grad()
                (-critic(made).mean()).backward()
                by_maker.step()
        return digest(maker.state_dict()) + digest(critic.state_dict()), ps.clock


def test_what_is_left_of_a_batch_is_void_where_a_script_steps_twice_on_it(
    tmp_path: Path,
) -> None:
    with job_in(tmp_path / "one", job_seed=5) as job:
        works = dict.fromkeys(WORKERS, lambda name: train_gan(job, name))
        with Crew(works) as crew:
            expected = crew.results()
    with (
        job_in(tmp_path / "two", job_seed=5, lease_ttl_ms=2_000) as job,
        ThreadPoolExecutor(1) as saver,
    ):
        saving: list[Future[Any]] = []

        def disturb(worker_id: str, batch: int) -> None:
            if (worker_id, batch) == ("b", 4):
                saving.append(saver.submit(save, job))
            elif (worker_id, batch) == ("b", 8) and len(saving) == 1:
                saving.append(saving[0])
                saving[0].result(30)
                job.replace_shard(1)

        works = dict.fromkeys(WORKERS, lambda name: train_gan(job, name, disturb))
        with Crew(works) as crew:
            found = crew.results()
    assert expected == found
    assert {clock for _, clock in found.values()} == {2 * EPOCHS * STEPS_OF_EPOCH}


def test_processes_that_push_as_one_train_what_is_left_of_the_epoch_returned_to(
    tmp_path: Path,
) -> None:
    with job_in(tmp_path, workers_min=1, job_seed=5, lease_ttl_ms=2_000) as job:
        clocks: list[int] = []

        def script(ps: psworker.Connection, index: int) -> int:
            with ONE_AFTER_THE_OTHER:
                torch.manual_seed(0)
                model: Any = nn.Linear(8, 2)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
            loader: Any = DataLoader(
                TensorDataset(torch.ones(BATCH_SIZE * STEPS_OF_EPOCH * 2, 8)),
                batch_size=BATCH_SIZE,
            )
            model, optimizer, loader = ps.prepare(model, optimizer, loader)
            count = 0
            for _ in range(EPOCHS):
                for (batch,) in loader:
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
                    count += 1
                    if index:
                        continue
                    if count == 3:
                        clocks.append(save(job).clock)
                    elif count == STEPS_OF_EPOCH + 2:
                        job.replace_shard(1)
            return ps.clock

        assert run_group(job, 2, script) == [EPOCHS * STEPS_OF_EPOCH] * 2
        epochs = job.coordinator.core.ledger.epochs()
        assert [each.epoch for each in epochs if each.is_closed] == [*range(EPOCHS)]
        assert job.coordinator.core.progress.start_point is not None
        assert job.coordinator.core.progress.start_point.clock == clocks[0]


def train_locally(
    job: Job, worker_id: str, after_step: Callable[[str, int], object] = lambda *_: None
) -> tuple[str, float, int]:
    """Rounds of local steps; a digest of the model, the rate, and the clock."""
    count = 0
    with connect(job, worker_id) as ps:
        with ONE_AFTER_THE_OTHER:
            torch.manual_seed(0)
            model: Any = nn.Linear(8, 2)
            inputs = torch.randn(BATCH_SIZE * STEPS_OF_EPOCH * len(WORKERS), 8)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(
            TensorDataset(inputs), batch_size=BATCH_SIZE, shuffle=True
        )
        scheduler: Any = lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        model, optimizer, loader, scheduler = ps.prepare(
            model, optimizer, loader, scheduler, strategy=psworker.LocalSteps(2)
        )
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                count += 1
                after_step(worker_id, count)
            scheduler.step()
        return digest(model.state_dict()), optimizer.param_groups[0]["lr"], ps.clock


def test_rounds_of_local_steps_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """With an inner optimizer without state the end is that of a job without a loss."""
    with job_in(tmp_path / "one", job_seed=5) as job:
        works = dict.fromkeys(WORKERS, lambda name: train_locally(job, name))
        with Crew(works) as crew:
            expected = crew.results()
    assert {clock for _, _, clock in expected.values()} == {3 * EPOCHS}
    with (
        job_in(tmp_path / "two", job_seed=5, lease_ttl_ms=2_000) as job,
        ThreadPoolExecutor(1) as saver,
    ):
        saving: list[Future[Any]] = []

        def disturb(worker_id: str, step: int) -> None:
            if worker_id == "a" and step == 7 and not saving:
                saving.append(saver.submit(save, job))
            elif worker_id == "a" and step == 11 and saving[0] is not None:
                saving[0].result(30)
                saving[0] = None  # type: ignore[call-overload]
                job.replace_shard(1)

        works = dict.fromkeys(WORKERS, lambda name: train_locally(job, name, disturb))
        with Crew(works) as crew:
            found = crew.results()
    assert found == expected
