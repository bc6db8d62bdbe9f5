"""A worker that has joined and is long in coming: others go on without it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pswire.membership import Mode, StepAtomicity
from psworker.connection import Connection
from psworker.member import catch_up
from tests.integration.job import WAIT_TIMEOUT_S, Crew, Job, connect
from tests.integration.ones_worker import Worker

LIMIT_S = 0.3


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "JOIN_LIMIT_S", LIMIT_S)


@contextmanager
def training(worker: Worker) -> Iterator[Callable[[int], None]]:
    """Lets a worker train meanwhile; waits for so many more of its steps."""
    is_over = threading.Event()
    stepped = threading.Semaphore(0)

    def train(_: str) -> None:
        while not is_over.is_set():
            worker.step()
            stepped.release()

    def wait_steps(count: int) -> None:
        for _ in range(count):
            assert stepped.acquire(timeout=WAIT_TIMEOUT_S)

    with Crew({"w0": train}) as crew:
        try:
            yield wait_steps
        finally:
            is_over.set()
        crew.results()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"step_atomicity": StepAtomicity.CLOCK},
        {"mode": Mode.SSP, "staleness_bound": 1},
    ],
    ids=["bsp", "two phases", "ssp"],
)
def test_others_go_on_and_the_joiners_first_gradient_is_too_old(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path, **settings) as job:
        first = Worker.of(job, "w0")
        first.step()
        late = Worker.of(job, "w1")
        with first.ps:
            base = late.ps.clock
            with training(first) as wait_steps:
                late.backward()
                wait_steps(8)  # while the late one computes
                result = late.step()
                assert result.dropped
                assert result.clock >= base + 4
                assert late.step().outcome == "applied"
                late.ps.close()
        # Each but the dropped one is an update, in BSP together with the other's.
        last = first.ps.last_push
        assert last is not None
        updates = last.clock if not settings.get("mode") else last.clock + 1
        assert job.step_counts(0) == {updates}
        assert first.value == -updates
    assert "went on without it" in caplog.text


def test_a_joiner_that_is_in_time_stands_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "JOIN_LIMIT_S", 60.0)  # no machine is so slow
    with Job(tmp_path) as job:
        first = Worker.of(job, "w0")
        late = Worker.of(job, "w1")
        with first.ps, training(first), late.ps:
            for _ in range(3):
                assert late.step().outcome == "applied"
            assert late.ps.clock == 3


def test_who_leaves_before_its_first_step_leaves_in_good_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path) as job:
        first = Worker.of(job, "w0")
        late = Worker.of(job, "w1")
        with first.ps, training(first) as wait_steps:
            wait_steps(8)
            late.ps.close()
        assert late.value == 0
    assert "in good order" not in caplog.text


def test_a_loader_finds_the_place_taken_and_goes_on(tmp_path: Path) -> None:
    """The joiner waits for data; all of it is leased to the others."""
    data = TensorDataset(torch.arange(4.0).reshape(4, 1))

    def prepared(ps: Connection) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:  # type: ignore[type-arg]
        model = nn.Linear(1, 1)
        result: tuple[nn.Module, torch.optim.Optimizer, DataLoader] = ps.prepare(  # type: ignore[type-arg]
            model,
            torch.optim.SGD(model.parameters(), lr=1e-5),
            DataLoader(data, batch_size=4),
        )
        return result

    has_joined = threading.Event()
    may_draw = threading.Event()

    def late(worker_id: str) -> int:
        with connect(job, worker_id) as ps:
            _, _, loader = prepared(ps)
            has_joined.set()
            assert may_draw.wait(WAIT_TIMEOUT_S)
            assert list(loader) == []
            return ps.clock

    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model, optimizer, loader = prepared(ps)
        with Crew({"w1": late}) as crew:
            for (inputs,) in loader:
                assert has_joined.wait(WAIT_TIMEOUT_S)
                for count in range(20):
                    model(inputs).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if count == 8:
                        may_draw.set()
            assert crew.results()["w1"] == 20
