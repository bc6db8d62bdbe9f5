"""Two-phase steps: nothing of a clock is applied before every shard has all of it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.membership import LossPolicy, Mode, StepAtomicity
from tests.doubles.fault_proxy import FaultProxy
from tests.integration.broken_calls import (
    Fault,
    breakable_shards,
    cut_upload,
    lose_reply,
)
from tests.integration.held_commits import commits_held
from tests.integration.job import Crew, Job, connect
from tests.integration.ones_worker import Worker, run_all

CLOCK: Final = StepAtomicity.CLOCK


def worker_of(job: Job, worker_id: str, address: str = "") -> Worker:
    """One whose pushes are large enough to break in the middle."""
    return Worker.of(job, worker_id, address=address, element_count=200_000)


def workers_of(job: Job, count: int) -> list[Worker]:
    names = [f"w{index}" for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda name: worker_of(job, name), names))


@pytest.mark.parametrize("mode", Mode)
def test_a_step_in_two_phases_gives_what_one_phase_gives(
    tmp_path: Path, mode: Mode
) -> None:
    bound = 2 if mode is Mode.SSP else None
    with Job(
        tmp_path,
        workers_min=2,
        mode=mode,
        staleness_bound=bound,
        step_atomicity=CLOCK,
    ) as job:
        first, second = workers_of(job, 2)
        with first.ps, second.ps:
            run_all(
                lambda: [first.step() for _ in range(10)],
                lambda: [second.step() for _ in range(10)],
            )
            assert {p.outcome for p in first.pushes + second.pushes} == {"applied"}
        count = 10 if mode is Mode.BSP else 20
        assert job.step_counts(0) == {count}
        with psworker.SnapshotReader(job.address) as reader:
            values = list(reader.latest().state_dict().values())
        assert torch.cat(values).eq(-count).all()
        # In SSP and ASP shards may commit the last steps of two workers in different
        # orders, so that what answers one has the other's on some of them.
        for worker in (first, second):
            held = torch.cat([each.detach() for each in worker.model.parameters()])
            assert held.ge(-count).all()
            assert held.le(-10).all()


@pytest.mark.parametrize("fault", [lose_reply, cut_upload(1)])
def test_a_push_whose_call_breaks_is_committed_and_applied_once(
    tmp_path: Path, fault: Fault
) -> None:
    with (
        breakable_shards() as shards,
        Job(tmp_path, workers_min=2, step_atomicity=CLOCK) as job,
    ):
        first, second = workers_of(job, 2)
        with first.ps, second.ps:
            for shard_index in (0, 1):
                shards[shard_index].faults.append(fault)
                run_all(first.step, second.step)
            assert first.value == second.value == -2
            assert first.ps.clock == second.ps.clock == 2


def test_one_driver_is_enough(tmp_path: Path) -> None:
    with (
        Job(tmp_path, workers_min=2, step_atomicity=CLOCK) as job,
        commits_held("w0"),
    ):
        first, second = workers_of(job, 2)
        with first.ps, second.ps:
            run_all(first.step, second.step)
            assert first.value == second.value == -1


def test_a_clock_that_some_shard_has_committed_is_finished_by_a_record(
    tmp_path: Path,
) -> None:
    """The one driver told shard 0 to commit, and was lost before it told shard 1."""
    with (
        Job(tmp_path, step_atomicity=CLOCK, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):
        other = worker_of(job, "w1")
        lost = worker_of(job, "w0", proxy.address)
        with (
            other.ps,
            commits_held("w1"),
            commits_held("w0", shard_index=1) as wanted,
            Crew({"w0": lambda _: lost.step(), "w1": lambda _: other.step()}) as crew,
        ):
            assert wanted.wait(30)
            assert not any(future.done() for future in crew.futures.values())
            proxy.refuse()
            record = job.wait_record(lambda record: len(record.members) == 1)
            assert record.commit is not None
            proxy.heal()
            crew.results()
            assert other.value == -1
            assert lost.pushes[-1].outcome == "applied"
            lost.ps.close()


def test_a_clock_whose_only_drivers_died_is_finished_by_those_left(
    tmp_path: Path,
) -> None:
    """w1 is told `staged` with w0's push in the clock, and commits without it too."""
    with (
        Job(tmp_path, step_atomicity=CLOCK, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):
        other = worker_of(job, "w1")
        worker = worker_of(job, "w0", proxy.address)
        with other.ps, worker.ps, Crew({"w0": lambda _: worker.step()}) as crew:
            job.wait_pushed("w0", 1)
            proxy.refuse()
            job.wait_record(lambda record: len(record.members) == 1)
            other.step()
            assert other.value == -1
            proxy.heal()
            assert crew.results()["w0"].outcome == "applied"


def test_with_wait_a_replacement_takes_over_the_open_clock(tmp_path: Path) -> None:
    with (
        Job(
            tmp_path,
            workers_min=2,
            worker_loss_policy=LossPolicy.WAIT,
            sockets=True,
        ) as job,
        FaultProxy(job.address) as proxy,
    ):
        with ThreadPoolExecutor(2) as pool:
            lost, other = pool.map(
                lambda pair: worker_of(job, *pair),
                (("w0", proxy.address), ("w1", job.address)),
            )
        run_all(lost.step, other.step)
        with other.ps, Crew({"w1": lambda _: other.step()}) as crew:
            job.wait_pushed("w1", 2)
            proxy.refuse()
            replacement = worker_of(job, "w0")
            with replacement.ps:
                assert replacement.ps.clock == 1
                assert not crew.futures["w1"].done()
                result = replacement.step()
                crew.results()
                assert (result.outcome, result.clock) == ("applied", 2)
                assert replacement.value == other.value == -2
            lost.ps._end(leaves=False)


def test_a_backup_worker_that_is_late_is_dropped_and_jumps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path, workers_min=3, backup_worker_count=1) as job:
        first, second, late = workers_of(job, 3)
        with first.ps, second.ps, late.ps:
            run_all(
                lambda: [first.step() for _ in range(4)],
                lambda: [second.step() for _ in range(4)],
            )
            result = late.step()
            assert result.dropped
            assert late.ps.last_push is not None
            assert late.ps.last_push.dropped
            assert (result.clock, late.ps.clock) == (4, 4)
            assert late.value == first.value == -4
            # In time again, it counts: two of the three are enough, and two come.
            run_all(first.step, late.step)
            assert late.pushes[-1].outcome == "applied"
            dropped = second.step()
            assert dropped.dropped
            assert second.ps.clock == 5
            assert first.value == second.value == late.value == -5
        assert job.step_counts(0) == {5}
    told = [text for text in caplog.messages if "was thrown away" in text]
    assert len(told) == 2  # once for each worker


def test_samples_of_dropped_gradients_are_told_as_dropped(tmp_path: Path) -> None:
    """The epoch closes, and every sample is consumed or dropped."""
    data = TensorDataset(torch.arange(96.0).reshape(96, 1))
    dropped: dict[str, list[float]] = {}

    def train(worker_id: str) -> list[float]:
        seen: list[float] = []
        dropped[worker_id] = []
        with connect(job, worker_id) as ps:
            model = nn.Linear(1, 1)
            model, optimizer, loader = ps.prepare(
                model,
                torch.optim.SGD(model.parameters(), lr=1e-5),
                DataLoader(data, batch_size=4, shuffle=True),
            )
            for (inputs,) in loader:
                seen += inputs.flatten().tolist()
                model(inputs).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert ps.last_push is not None
                if ps.last_push.dropped:
                    dropped[worker_id] += inputs.flatten().tolist()
        return seen

    with (
        Job(tmp_path, workers_min=3, backup_worker_count=1) as job,
        Crew(dict.fromkeys(("w0", "w1", "w2"), train)) as crew,
    ):
        results = crew.results()
        ledger = job.ask(
            lambda: next(iter(job.coordinator.core.ledger._epochs.values()))
        )
        assert ledger.is_closed
        dropped_count = sum(map(len, dropped.values()))
        assert ledger.dropped_count == dropped_count
        assert ledger.consumed_count + dropped_count == 96
    assert sorted(v for seen in results.values() for v in seen) == [
        float(index) for index in range(96)
    ]
