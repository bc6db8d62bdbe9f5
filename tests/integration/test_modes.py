"""BSP, SSP and ASP, and changes between them while workers train."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.membership import Mode, ModeTerms, StepAtomicity
from psworker.connection import Connection
from tests.integration.job import Crew, Job, connect, short_steps
from tests.integration.ones_worker import Worker, run_all

BOUND: Final = 2

CHANGES: Final = (
    (Mode.ASP, 0),
    (Mode.BSP, 0),
    (Mode.SSP, 1),
    (Mode.ASP, 0),
    (Mode.SSP, 4),
    (Mode.BSP, 0),
    (Mode.ASP, 0),
)


def two_workers(job: Job) -> list[Worker]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda name: Worker.of(job, name), ("w0", "w1")))


def set_mode(job: Job, mode: Mode, bound: int = 0) -> None:
    """As `psctl mode` does."""
    record = job.run(job.coordinator.set_mode(ModeTerms(mode, bound), timeout_s=30))
    assert record.mode is mode


def test_in_asp_each_push_is_an_update_of_its_own(tmp_path: Path) -> None:
    with Job(tmp_path, workers_min=2, mode=Mode.ASP) as job:
        fast, slow = two_workers(job)
        with fast.ps, slow.ps:
            assert fast.ps.mode == "asp"
            for count in range(1, 6):
                result = fast.step()
                assert (result.clock, result.mode) == (count, "asp")
                assert result.staleness == 0
                assert fast.value == -count
            late = slow.step()
            assert late.staleness == 5
            assert (late.clock, late.frontier) == (1, 1)
            assert slow.value == -6
            assert (fast.ps.clock, slow.ps.clock) == (5, 1)
        assert late.version == 6
        assert job.step_counts(0) == {6}


def test_in_ssp_nobody_is_further_ahead_than_the_bound(tmp_path: Path) -> None:
    with Job(tmp_path, workers_min=2, mode=Mode.SSP, staleness_bound=BOUND) as job:
        fast, slow = two_workers(job)
        with fast.ps, slow.ps:
            for _ in range(BOUND):
                fast.step()
            with Crew({"w0": lambda _: fast.step()}) as crew:
                job.wait_pushed("w0", BOUND + 1)
                assert not crew.futures["w0"].done()
                slow.step()
                crew.results()
            blocked = fast.pushes[-1]
            assert (blocked.clock, blocked.frontier) == (BOUND + 1, 1)
            # All of the slow one's steps up to the bound are in what it has got.
            assert fast.value == -(BOUND + 2)
            run_all(
                lambda: [fast.step() for _ in range(20)],
                lambda: [slow.step() for _ in range(22)],
            )
        for push in fast.pushes + slow.pushes:
            assert push.clock - push.frontier <= BOUND
        assert max(push.version for push in fast.pushes + slow.pushes) == 46
        assert job.step_counts(0) == {46}


def test_a_wait_for_the_slowest_names_it_with_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psserver.shard.rpc.parameter_service.WAITING_INTERVAL_MS", 200)
    with Job(tmp_path, workers_min=2, mode=Mode.SSP, staleness_bound=0) as job:
        with ThreadPoolExecutor(2) as pool:
            fast, slow = pool.map(lambda name: Worker.of(job, name), ("w0", "w1"))
        with fast.ps, slow.ps:
            with (
                short_steps(fast.ps, 6),
                pytest.raises(psworker.StepTimeoutError) as caught,
            ):
                fast.step()
            slow_result = threading.Thread(target=slow.step)
            slow_result.start()
            fast.optimizer.step()  # the same push
            slow_result.join(20)
            assert fast.value == slow.value == -2
    assert "the step to clock 1 was not complete within 6 s" in str(caught.value)
    assert "w1 (alive, no push yet)" in str(caught.value)


@pytest.mark.parametrize("apart", [0, 7])
def test_the_mode_changes_while_workers_train_and_nothing_is_lost(
    tmp_path: Path, apart: int
) -> None:
    """From BSP to ASP, with clocks far apart to BSP, to SSP, and back."""
    with Job(tmp_path, workers_min=2) as job:
        fast, slow = two_workers(job)
        count = 0
        with fast.ps, slow.ps:

            def both(times: int) -> None:
                nonlocal count
                run_all(
                    lambda: [fast.step() for _ in range(times)],
                    lambda: [slow.step() for _ in range(times)],
                )
                count += 2 * times

            both(2)
            set_mode(job, Mode.ASP)
            both(1)
            for _ in range(apart):
                fast.step()
            count += apart
            assert fast.ps.mode == "asp"
            version = fast.pushes[-1].version
            set_mode(job, Mode.BSP)
            both(2)
            # One numbering for both again, and no step came twice or went.
            assert fast.ps.clock == slow.ps.clock
            assert torch.equal(
                *(next(iter(each.model.parameters())) for each in (fast, slow))
            )
            assert fast.pushes[-1].mode == "bsp"
            assert fast.pushes[-1].version >= version + 4
            set_mode(job, Mode.SSP, BOUND)
            both(3)
            set_mode(job, Mode.BSP)
            both(2)
        assert fast.pushes[-1].version == slow.pushes[-1].version == count
        assert all(push.outcome == "applied" for push in fast.pushes + slow.pushes)


@pytest.mark.parametrize("atomicity", StepAtomicity)
def test_the_mode_changes_under_load(tmp_path: Path, atomicity: StepAtomicity) -> None:
    with Job(tmp_path, workers_min=3, step_atomicity=atomicity) as job:
        with ThreadPoolExecutor(3) as pool:
            workers = list(
                pool.map(lambda name: Worker.of(job, name), ("w0", "w1", "w2"))
            )
        is_over = threading.Event()
        stepped = threading.Semaphore(0)

        def train(worker: Worker) -> None:
            while not is_over.is_set():
                worker.step()
                stepped.release()

        works = {w.ps.worker_id: lambda _, w=w: train(w) for w in workers}
        with Crew(works) as crew:
            try:
                for mode, bound in CHANGES:
                    set_mode(job, mode, bound)
                    for _ in range(15):  # each mode is trained in for a while
                        assert stepped.acquire(timeout=20)
            finally:
                is_over.set()
            crew.results()
        # Of pushes at once each shard may have had the other one first.
        last = workers[0].step()
        assert last.version == sum(len(worker.pushes) for worker in workers)
        for worker in workers:
            assert {push.outcome for push in worker.pushes} == {"applied"}
            worker.ps.close()


@pytest.mark.parametrize("mode", [Mode.SSP, Mode.ASP])
def test_an_epoch_is_shared_out_on_demand_and_seen_once(
    tmp_path: Path, mode: Mode
) -> None:
    data = TensorDataset(torch.arange(120.0).reshape(120, 1))
    bound = BOUND if mode is Mode.SSP else None

    def train(worker_id: str) -> list[list[float]]:
        seen: list[list[float]] = []
        with connect(job, worker_id) as ps:
            model = nn.Linear(1, 1)
            model, optimizer, loader = ps.prepare(
                model,
                torch.optim.SGD(model.parameters(), lr=1e-5),
                DataLoader(data, batch_size=4, shuffle=True),
            )
            for _ in range(3):
                seen.append([])
                for (inputs,) in loader:
                    seen[-1] += inputs.flatten().tolist()
                    model(inputs).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return seen

    with (
        Job(tmp_path, workers_min=3, mode=mode, staleness_bound=bound) as job,
        Crew(dict.fromkeys(("w0", "w1", "w2"), train)) as crew,
    ):
        results = crew.results()
    for epoch in range(3):
        seen = [value for each in results.values() for value in each[epoch]]
        assert sorted(seen) == [float(index) for index in range(120)]


def test_a_worker_without_data_holds_nobody_back_in_ssp(tmp_path: Path) -> None:
    """All that is left of the epoch is one worker's, who takes many steps on it."""
    data = TensorDataset(torch.arange(8.0).reshape(8, 1))
    is_held = threading.Barrier(2)

    def prepared(ps: Connection) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:  # type: ignore[type-arg]
        model = nn.Linear(1, 1)
        result: tuple[nn.Module, torch.optim.Optimizer, DataLoader] = ps.prepare(  # type: ignore[type-arg]
            model,
            torch.optim.SGD(model.parameters(), lr=1e-5),
            DataLoader(data, batch_size=8),
        )
        return result

    def busy(worker_id: str) -> int:
        with connect(job, worker_id) as ps:
            model, optimizer, loader = prepared(ps)
            for (inputs,) in loader:
                is_held.wait(20)
                for _ in range(10):
                    model(inputs).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return ps.clock

    def idle(worker_id: str) -> int:
        with connect(job, worker_id) as ps:
            _, _, loader = prepared(ps)
            is_held.wait(20)
            assert list(loader) == []
            return ps.clock

    with (
        Job(tmp_path, workers_min=2, mode=Mode.SSP, staleness_bound=1) as job,
        Crew({"w0": busy, "w1": idle}) as crew,
    ):
        clocks = crew.results()
    assert clocks["w0"] == 10
    assert clocks["w1"] >= 8
