"""Mode quorum: a clock closes with those that are there first, and nothing is lost."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psctl.check_history import check_history
from pswire.aggregation import Aggregation
from pswire.membership import Mode, ModeTerms
from tests.integration.job import Crew, Job, connect
from tests.integration.ones_worker import Worker, run_all


def workers_of(job: Job, *names: str) -> list[Worker]:
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda name: Worker.of(job, name), names))


def test_nobody_waits_for_a_worker_that_does_not_come(tmp_path: Path) -> None:
    """And when it comes its push counts in the clock that is open then."""
    history = f"{tmp_path / 'history'}/"
    with Job(
        tmp_path, workers_min=3, mode=Mode.QUORUM, quorum=2, history=history
    ) as job:
        fast, other, slow = workers_of(job, "w0", "w1", "w2")
        with fast.ps, other.ps, slow.ps:
            for clock in range(1, 6):
                run_all(fast.step, other.step)
                assert fast.pushes[-1].clock == clock
                assert fast.value == other.value == -clock
            assert fast.ps.mode == "quorum"
            run_all(fast.step, slow.step)
            assert (slow.pushes[-1].outcome, slow.pushes[-1].clock) == ("applied", 6)
            assert slow.value == fast.value == -6
        assert job.step_counts(0) == {6}
    report = check_history([tmp_path / "history"])
    assert report.is_clean, report
    assert report.findings.checks["G40"] > 20


def test_a_quorum_that_is_asked_for_closes_a_clock_that_hangs(tmp_path: Path) -> None:
    """From BSP, where it waits for one that does not come, and back again."""
    with Job(tmp_path, workers_min=2) as job:
        fast, slow = workers_of(job, "w0", "w1")
        with fast.ps, slow.ps:
            run_all(fast.step, slow.step)
            with Crew({"w0": lambda _: fast.step()}) as crew:
                job.wait_pushed("w0", 2)
                quorum = ModeTerms(Mode.QUORUM, quorum=1)
                job.run(job.coordinator.set_mode(quorum, timeout_s=10))
                crew.results()
            assert fast.value == -2
            run_all(fast.step)
            assert fast.value == -3
            job.run(job.coordinator.set_mode(ModeTerms(Mode.BSP), timeout_s=10))
            run_all(fast.step, slow.step)
            assert fast.pushes[-1].mode == slow.pushes[-1].mode == "bsp"


def test_the_samples_of_late_pushes_count_once_and_none_is_dropped(
    tmp_path: Path,
) -> None:
    sample_count = 60
    is_ahead = threading.Event()
    outcomes: dict[str, list[str]] = {"w0": [], "w1": []}

    def train(worker_id: str) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.ones(sample_count, 1))
        with connect(job, worker_id) as ps:
            model, optimizer, loader = ps.prepare(
                model, optimizer, DataLoader(data, batch_size=4)
            )
            for (inputs,) in loader:
                loss = model(inputs).sum()
                if worker_id == "w1" and not is_ahead.wait(30):
                    raise TimeoutError
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                assert ps.last_push is not None
                outcomes[worker_id].append(ps.last_push.outcome)
                if len(outcomes["w0"]) == 3:
                    is_ahead.set()

    with Job(tmp_path, workers_min=2, mode=Mode.QUORUM, quorum=1) as job:
        with Crew(dict.fromkeys(("w0", "w1"), train)) as crew:
            crew.results()
        ledger = job.coordinator.core.ledger
        (report,) = job.ask(lambda: [each.report for each in ledger.epochs()])
    assert {*outcomes["w0"], *outcomes["w1"]} == {"applied"}
    assert (report.seen_once, report.dropped) == (sample_count, 0)


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.QUORUM])
def test_radial_averages_length_and_direction_apart(tmp_path: Path, mode: Mode) -> None:
    quorum = 2 if mode is Mode.QUORUM else None
    radial = Aggregation.parse("radial")
    with Job(
        tmp_path, workers_min=2, mode=mode, quorum=quorum, aggregation=radial
    ) as job:
        one, other = workers_of(job, "w0", "w1")

        def step(worker: Worker, first: float, second: float) -> None:
            for parameter, value in zip(
                worker.model.parameters(), (first, second), strict=True
            ):
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad[0] = value
            worker.optimizer.step()

        with one.ps, other.ps:
            run_all(lambda: step(one, 3.0, 0.0), lambda: step(other, 0.0, 1.0))
            for worker in (one, other):
                found = [float(each.detach()[0]) for each in worker.model.parameters()]
                assert found == pytest.approx([-(2**0.5)] * 2)
                assert worker.ps.last_push is not None
                assert worker.ps.last_push.gradient_factor == 1
