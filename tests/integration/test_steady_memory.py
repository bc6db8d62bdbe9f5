"""What comes and goes leaves nothing behind, in daemons and in workers.

Objects are counted, which is exact. By resident memory of real processes, and ten
thousand times, the same is held in `tests/soak`.
"""

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

import psworker
from pswire.membership import Mode
from tests.doubles.children import wait_until
from tests.integration.job import Job, connect

WARM_COUNT: Final = 12
ROUND_COUNT: Final = 40
SETTLE_TIMEOUT_S: Final = 30.0


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """What pytest keeps of the log grows."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _few_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand that have ended, events and reports are remembered, and no more."""
    monkeypatch.setattr("psserver.shard.core.member_on_shard.DEPARTED_COUNT_MAX", 8)
    monkeypatch.setattr("psserver.coordinator.core.events.EVENT_COUNT_MAX", 8)
    monkeypatch.setattr("psserver.coordinator.core.shard_map.STANDING_COUNT_MAX", 2)
    monkeypatch.setattr("psserver.coordinator.core.progress_history.POINT_COUNT_MAX", 8)


def test_workers_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=2, sockets=True) as job, connect(job, "w0") as ps:
        step = stepper(ps, 3)

        def visit() -> None:
            with connect(job, "guest") as guest:
                stepper(guest, 3)
            step()

        assert_flat(visit)


def test_nor_do_those_that_push_and_share_memory(tmp_path: Path) -> None:
    before = mapped_segment_count()  # of tests that came before, maybe
    with (
        Job(tmp_path, shard_count=2, mode=Mode.ASP, sockets=True) as job,
        connect(job, "w0") as ps,
    ):
        step = stepper(ps, 300)

        def visit() -> None:
            with connect(job, "guest") as guest:
                stepper(guest, 300)()
            step()

        assert_flat(visit)
        # Of each shard its values, and the gradient of `w0` and of the last guest; all
        # of them twice, as all processes are one here. The guest before may still go.
        wait_until(lambda: mapped_segment_count() - before <= 2 * 2 * 3, "few segments")
    wait_until(lambda: mapped_segment_count() <= before, "the end of all segments")


def test_readers_leave_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=2, sockets=True) as job, connect(job, "w0") as ps:
        step = stepper(ps, 3)

        def visit() -> None:
            with psworker.SnapshotReader(job.address) as reader:
                reader.latest()
            step()

        assert_flat(visit)


def test_steps_leave_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=2, sockets=True) as job, connect(job, "w0") as ps:
        step = stepper(ps, 3)

        def work() -> None:
            for _ in range(5):
                step()

        assert_flat(work)


def stepper(ps: psworker.Connection, width: int) -> Callable[[], None]:
    """Prepares a model; what makes a step of it."""
    model = nn.Linear(width, width)
    model, optimizer = ps.prepare(model, torch.optim.Adam(model.parameters()))

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    return step


def assert_flat(work: Callable[[], None]) -> None:
    objects()  # the first count makes some that stay, such as what ABCs know of types
    for _ in range(WARM_COUNT):
        work()
    before = objects()
    for _ in range(ROUND_COUNT):
        work()
    # One in each round, for good: what is under way at the moment of counting, of more
    # than one round on a busy machine, is no growth.
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while grown := growth(before):
        assert time.monotonic() < deadline, f"{grown} in {ROUND_COUNT} rounds"
        time.sleep(0.1)


def growth(before: Counter[str]) -> dict[str, int]:
    return {
        name: count - before[name]
        for name, count in objects().items()
        if count - before[name] >= ROUND_COUNT - 2
    }


def objects() -> Counter[str]:
    gc.collect()
    return Counter(repr(type(each)) for each in gc.get_objects())


def mapped_segment_count() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:")
