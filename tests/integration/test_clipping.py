"""The global norm over all workers and shards, clipped as in one process.

One process has the gradient of the union of all batches, and clips it by
`torch.nn.utils.clip_grad_norm_`.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import psworker
from pswire.membership import Mode, ModeTerms
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.fault_proxy import FaultProxy
from tests.doubles.promised_numbers import DEVIATION_MAX, NORM_DEVIATION_MAX
from tests.integration.held_commits import commits_held
from tests.integration.job import (
    WAIT_TIMEOUT_S,
    Crew,
    Job,
    connect,
    deviation,
    run_workers,
)
from tests.integration.ones_worker import Worker, run_all

SEED: Final = 20261128
STEP_COUNT: Final = 12
BATCHES: Final = {1: (16,), 2: (11, 5), 3: (3, 9, 4)}
"""Samples of each worker in every step: 16 together."""

CLIP: Final = 1.2
"""Norms are 0.6 to 2.3 in the training below: some steps are clipped, some are not."""

small_chunks = cut_into(64, 512)
"""Cuts a model of a few KiB into a dozen chunks, on both sides alike."""


@dataclass(frozen=True)
class Training:
    """The same script for one process and for every worker."""

    optimizer_class: Callable[..., torch.optim.Optimizer]
    settings: dict[str, Any]
    clip: float = CLIP

    def build(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 9))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        model[2].bias.requires_grad_(False)  # no gradient, in no norm
        return model, self.optimizer_class(model.parameters(), **self.settings)

    @staticmethod
    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(SEED + step)
        scale = 1.0 if step % 3 else 2.0
        return (
            torch.randn(16, 12, generator=generator),
            torch.randn(16, 9, generator=generator) * scale,
        )

    def in_one_process(self) -> tuple[list[torch.Tensor], list[float]]:
        model, optimizer = self.build(0)
        norms = []
        for step in range(STEP_COUNT):
            inputs, targets = self.batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            norms.append(float(norm))
            optimizer.step()
        return values_of(model), norms

    def on_worker(
        self,
        job: Job,
        worker_id: str,
        *,
        before_step: Callable[[int], None] = lambda step: None,
        overlap: bool = False,
    ) -> tuple[list[torch.Tensor], list[float]]:
        """Trains on this worker's rows of every batch."""
        rank = int(worker_id[1:])
        model, optimizer = self.build(rank)
        norms = []
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(
                model, optimizer, clip_grad_norm=self.clip, overlap=overlap
            )
            rows = BATCHES[job.workers_min]
            start = sum(rows[:rank])
            for step in range(STEP_COUNT):
                inputs, targets = (
                    each[start : start + rows[rank]] for each in self.batch(step)
                )
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                before_step(step)
                optimizer.step(weight=rows[rank])
                assert ps.last_push is not None
                assert ps.last_push.grad_norm is not None
                norms.append(ps.last_push.grad_norm)
        return values_of(model), norms


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


SGD: Final = Training(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAMW: Final = Training(torch.optim.AdamW, {"lr": 0.01})


@pytest.mark.parametrize(
    ("training", "shard_count", "worker_count"),
    [(SGD, 1, 2), (SGD, 2, 3), (SGD, 3, 2), (ADAMW, 2, 2), (ADAMW, 3, 3)],
)
def test_clipped_steps_equal_one_process(
    training: Training, shard_count: int, worker_count: int, tmp_path: Path
) -> None:
    with Job(tmp_path, shard_count=shard_count, workers_min=worker_count) as job:
        results = run_workers(
            {
                f"w{rank}": lambda worker_id: training.on_worker(job, worker_id)
                for rank in range(worker_count)
            }
        )
    values, norms = training.in_one_process()
    assert min(norms) < training.clip < max(norms)
    for found, found_norms in results.values():
        assert all(
            torch.equal(a, b) for a, b in zip(found, results["w0"][0], strict=True)
        )
        assert found_norms == pytest.approx(norms, rel=NORM_DEVIATION_MAX)
    measured = deviation(results["w0"][0], values)
    print(f"seed {SEED}: deviation {measured:.2e}, norms {min(norms)} to {max(norms)}")
    assert measured <= DEVIATION_MAX
    assert math.isfinite(measured)


def test_steps_that_overlap_are_clipped_alike(tmp_path: Path) -> None:
    with Job(tmp_path, workers_min=2) as job:
        results = run_workers(
            dict.fromkeys(("w0", "w1"), lambda w: SGD.on_worker(job, w, overlap=True))
        )
    values, norms = SGD.in_one_process()
    for found, found_norms in results.values():
        assert found_norms == pytest.approx(norms, rel=NORM_DEVIATION_MAX)
        assert deviation(found, values) <= DEVIATION_MAX


def test_rows_of_a_sparse_embedding_count_in_the_norm(tmp_path: Path) -> None:
    def build(*, sparse: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(model: nn.Module, step: int, part: slice) -> None:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 50, (16,), generator=generator)[part]
        model.zero_grad()
        (model(rows) * 6).square().mean().backward()

    def work(worker_id: str) -> tuple[list[torch.Tensor], list[float]]:
        part = slice(0, 11) if worker_id == "w0" else slice(11, 16)
        norms = []
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(*built[worker_id], clip_grad_norm=1.0)
            for step in range(5):
                backward(model, step, part)
                optimizer.step(weight=part.stop - part.start)
                assert ps.last_push is not None
                assert ps.last_push.grad_norm is not None
                norms.append(ps.last_push.grad_norm)
        return values_of(model), norms

    # Here, since the seed is one for all threads.
    built = {worker_id: build(sparse=True) for worker_id in ("w0", "w1")}
    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})

    model, optimizer = build(sparse=False)
    norms = []
    for step in range(5):
        backward(model, step, slice(0, 16))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    assert max(norms) > 1.0
    for found, found_norms in results.values():
        assert found_norms == pytest.approx(norms, rel=NORM_DEVIATION_MAX)
        assert deviation(found, values_of(model)) <= DEVIATION_MAX


def test_modes_change_and_the_numbers_stay(tmp_path: Path) -> None:
    """In ASP a push is clipped by itself: with one worker that is the same."""
    modes = {3: Mode.ASP, 6: Mode.BSP, 9: Mode.SSP}

    with Job(tmp_path, shard_count=2) as job:

        def change_mode(step: int) -> None:
            if step in modes:
                bound = int(modes[step] is Mode.SSP)
                job.run(job.coordinator.set_mode(ModeTerms(modes[step], bound), 30.0))

        found, found_norms = SGD.on_worker(job, "w0", before_step=change_mode)

    values, norms = SGD.in_one_process()
    assert found_norms == pytest.approx(norms, rel=NORM_DEVIATION_MAX)
    assert deviation(found, values) <= DEVIATION_MAX


def test_workers_of_asp_clip_their_own_pushes(tmp_path: Path) -> None:
    with Job(tmp_path, mode=Mode.ASP) as job:
        first, second = ones_worker(job, "w0"), ones_worker(job, "w1")
        with first.ps, second.ps:
            for count, worker in enumerate((first, second, first), 1):
                push = worker.step()
                assert push.grad_norm == pytest.approx(ONES_NORM)
                assert worker.value == pytest.approx(-count * ONES_SCALE)


def test_a_loss_scale_is_in_no_norm(tmp_path: Path) -> None:
    """Gradients of float16 keep it until they are on a shard."""
    for mode in (Mode.BSP, Mode.ASP):
        with Job(tmp_path / mode.name, mode=mode) as job, connect(job, "w0") as ps:
            model = nn.ParameterList([torch.zeros(ONES_COUNT, dtype=torch.float16)])
            model, optimizer = ps.prepare(
                model,
                torch.optim.SGD(model.parameters(), lr=1.0),
                clip_grad_norm=ONES_CLIP,
            )
            model[0].grad = torch.full_like(model[0], 8.0)
            optimizer.grad_scale = torch.tensor(8.0)
            optimizer.step()
            assert ps.last_push is not None
            assert ps.last_push.grad_norm == pytest.approx(ONES_NORM)
            assert model[0][0].item() == pytest.approx(-ONES_SCALE, rel=1e-3)


def test_each_optimizer_is_clipped_by_its_own_norm(tmp_path: Path) -> None:
    """As a GAN has two: a step clips what it updates, and nothing else."""

    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))
        return model, [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]

    def gradients(model: nn.Module, step: int, rows: slice) -> None:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 5, generator=generator)[rows]
        model.zero_grad()
        (model(inputs) * 5).square().mean().backward()

    def work(worker_id: str) -> tuple[list[torch.Tensor], list[float]]:
        model, own = built[worker_id]
        rows = slice(0, 11) if worker_id == "w0" else slice(11, 16)
        norms = []
        with connect(job, worker_id) as ps:
            model, *optimizers = ps.prepare(model, *own, clip_grad_norm=0.9)
            for step in range(6):
                gradients(model, step, rows)
                optimizers[step % 2].step(weight=rows.stop - rows.start)
                assert ps.last_push is not None
                assert ps.last_push.grad_norm is not None
                norms.append(ps.last_push.grad_norm)
        return values_of(model), norms

    # Here, since the seed is one for all threads.
    built = {worker_id: build() for worker_id in ("w0", "w1")}
    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})

    model, optimizers = build()
    norms = []
    for step in range(6):
        gradients(model, step, slice(0, 16))
        held = model[step % 2].parameters()  # type: ignore[index]
        norms.append(float(nn.utils.clip_grad_norm_(held, 0.9)))
        optimizers[step % 2].step()
    for found, found_norms in results.values():
        assert found_norms == pytest.approx(norms, rel=NORM_DEVIATION_MAX)
        assert deviation(found, values_of(model)) <= DEVIATION_MAX


# Workers that are lost

ONES_COUNT: Final = 2_008
ONES_NORM: Final = math.sqrt(ONES_COUNT)
ONES_CLIP: Final = 1.5
ONES_SCALE: Final = ONES_CLIP / (ONES_NORM + 1e-6)


def ones_worker(job: Job, worker_id: str, address: str = "") -> Worker:
    """One whose every gradient is one in each of its 2,008 elements."""
    return Worker.of(job, worker_id, address=address, clip_grad_norm=ONES_CLIP)


def test_a_clock_that_one_shard_has_committed_has_the_same_scale_on_all(
    tmp_path: Path,
) -> None:
    """The one driver told shard 0 to commit, and was lost before it told shard 1."""
    with (
        Job(tmp_path, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):
        other = ones_worker(job, "w1")
        lost = ones_worker(job, "w0", proxy.address)
        with (
            other.ps,
            commits_held("w1"),
            commits_held("w0", shard_index=1) as wanted,
            Crew({"w0": lambda _: lost.step(), "w1": lambda _: other.step()}) as crew,
        ):
            assert wanted.wait(WAIT_TIMEOUT_S)
            assert not any(future.done() for future in crew.futures.values())
            proxy.refuse()
            record = job.wait_record(lambda record: len(record.members) == 1)
            assert record.commit is not None
            assert record.commit.gradient_scale == pytest.approx(ONES_SCALE)
            proxy.heal()
            results = crew.results()
            assert other.value == pytest.approx(-ONES_SCALE)
            assert results["w1"].grad_norm == pytest.approx(ONES_NORM)
            assert lost.pushes[-1].outcome == "applied"
            lost.ps.close()


def test_a_clock_that_nobody_is_left_to_commit_is_committed_by_a_record(
    tmp_path: Path,
) -> None:
    """Its one contributor is lost before it commits, and another one has joined."""
    with (
        Job(tmp_path, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):
        lost = ones_worker(job, "w0", proxy.address)
        with (
            commits_held("w0") as wanted,
            Crew(
                {
                    "w0": lambda _: lost.step(),
                    "w1": lambda _: join_after(job, wanted),
                }
            ) as crew,
        ):
            job.wait_record(lambda record: len(record.members) == 2)
            proxy.refuse()
            record = job.wait_record(lambda record: record.commit is not None)
            assert record.commit is not None
            assert record.commit.gradient_scale == pytest.approx(ONES_SCALE)
            proxy.heal()
            results = crew.results()
            assert results["w0"].outcome == "applied"
            joined: Worker = results["w1"]
            with joined.ps, lost.ps:
                assert joined.value == pytest.approx(-ONES_SCALE)


def join_after(job: Job, begun: threading.Event) -> Worker:
    assert begun.wait(WAIT_TIMEOUT_S)
    return ones_worker(job, "w1")


# Refused, and kept


def test_the_clip_survives_a_restart_and_another_one_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path) as job:
        first = ones_worker(job, "w0")
        with first.ps:
            first.step()
            job.stop_coordinator()
            job.start_coordinator()
            with (
                connect(job, "w1") as ps,
                pytest.raises(
                    psworker.OptimizerMismatchError,
                    match=r"the job has clip_grad_norm=1\.5, this worker has no "
                    "clip_grad_norm; give all workers",
                ),
            ):
                ps.prepare(first.model, torch.optim.SGD(first.model.parameters(), 1.0))
            first.step()
            assert first.value == pytest.approx(-2 * ONES_SCALE)
    switched = [t for t in caplog.messages if "switched two-phase steps on" in t]
    assert switched == [
        "clip_grad_norm=1.5 switched two-phase steps on in BSP: the norm of a gradient "
        "is known only when every shard has all of it"
    ]


def test_with_backup_workers_the_norm_is_of_those_that_count(tmp_path: Path) -> None:
    with Job(tmp_path, workers_min=3, backup_worker_count=1) as job:
        with ThreadPoolExecutor(3) as pool:
            crew = list(pool.map(lambda w: ones_worker(job, w), ("w0", "w1", "w2")))
        first, second, late = crew
        with first.ps, second.ps, late.ps:
            run_all(
                lambda: [first.step() for _ in range(4)],
                lambda: [second.step() for _ in range(4)],
            )
            for push in first.pushes + second.pushes:
                assert push.grad_norm == pytest.approx(ONES_NORM)
            dropped = late.step()
            assert (dropped.outcome, dropped.grad_norm) == ("dropped", None)
            assert late.value == first.value == pytest.approx(-4 * ONES_SCALE)
