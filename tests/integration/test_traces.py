"""A trace of a job that trains: what its processes record, and for whom they wait."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from psctl.trace import save_trace
from pswire.addresses import parse_address
from tests.integration.job import Job, connect

NAMES = ("w0", "w1")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a job whose members step until the test is over.

    The second one makes each step when the first one's gradient is there.
    """
    is_over, has_left = threading.Event(), threading.Event()
    with (
        pytest.MonkeyPatch.context() as patch,
        Job(tmp_path, sockets=True, shard_count=1, workers_min=2) as job,
        ThreadPoolExecutor(len(NAMES)) as threads,
    ):
        patch.setattr("psworker.member.session.WORK_INTERVAL_S", 0.05)
        patch.setattr("psserver.shard.rpc.coordinator_client.PROGRESS_INTERVAL_S", 0.05)
        # Each begins when it hears of the trace, wherever it is in a step.
        patch.setattr("psserver.coordinator.rpc.public_control.TRACE_LEAD_US", 0)

        def train(
            name: str, is_enough: threading.Event, wait: Callable[[int], None]
        ) -> None:
            with connect(job, name) as ps:
                model = torch.nn.ParameterList([torch.ones(8)])
                optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
                model, optimizer = ps.prepare(model, optimizer)
                while not is_enough.is_set():
                    wait(ps.clock + 1)
                    model[0].grad = torch.ones(8)
                    optimizer.step()

        def has_pushed(clock: int) -> None:
            job.wait_pushed("w0", clock)

        done = [
            threads.submit(train, "w0", has_left, lambda _: None),
            threads.submit(train, "w1", is_over, has_pushed),
        ]
        done[1].add_done_callback(lambda _: has_left.set())
        job.wait_record(lambda record: len(record.members) == len(NAMES))
        try:
            yield job.address
        finally:
            is_over.set()
            for each in done:
                each.result()


def test_a_trace_has_every_part_of_a_step_and_who_was_waited_for(
    address: str, tmp_path: Path
) -> None:
    out = tmp_path / "trace.json"

    report = save_trace(parse_address(address), out, step_count=5, timeout_s=60.0)

    assert all(each.is_complete for each in report.processes), report.text
    spans = {each.name: each.spans for each in report.processes}
    assert set(spans) == {"worker w0", "worker w1", "shard 0"}
    for name in NAMES:
        found = spans[f"worker {name}"]
        kinds = {each.kind for each in found}
        assert kinds > {"compute", "send"}
        assert kinds - {"compute", "send"} <= {"wait", "idle"}
        assert len({each.step for each in found}) == 5
    shard = spans["shard 0"]
    assert {each.kind for each in shard} == {"receive", "hold", "answer", "apply"}
    assert {each.lane for each in shard if each.kind == "hold"} == set(NAMES)
    events = json.loads(out.read_text())["traceEvents"]
    awaited = [each["args"].get("waited_for") for each in events if "args" in each]
    assert "w1" in awaited
