"""Training goes on while the coordinator is away, in every mode."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from psserver.shard.host.shard_host import ShardHost
from pswire.membership import Mode, ModeTerms, WorkerState
from tests.integration.job import WAIT_TIMEOUT_S, Crew, Job, connect


def train(job: Job, worker_id: str, enough: threading.Event) -> int:
    """Steps until there were enough; returns how many there were."""
    with connect(job, worker_id) as ps:
        model = nn.ParameterList([torch.zeros(8), torch.zeros(2000)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = ps.prepare(model, optimizer)
        step_count = 0
        # All end at one clock, so that nobody waits for one that has left.
        while not enough.is_set() or ps.clock % 50:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            step_count += 1
        return step_count


def wait_version(job: Job, above: int) -> int:
    """The version of every shard, once it is above one."""

    def version(host: ShardHost) -> int:
        return host.model.core.clocks.version if host.has_model else 0

    for host in job.shards:
        assert job.run(
            host.changes.wait_until(
                lambda host=host: version(host) > above,  # type: ignore[misc]
                WAIT_TIMEOUT_S / 2,
            )
        ), f"shard {host.shard_index} stands at version {version(host)}"
    return job.ask(lambda: min(map(version, job.shards)))


@pytest.mark.parametrize(
    "mode", [Mode.BSP, pytest.param(Mode.SSP, marks=pytest.mark.repeat), Mode.ASP]
)
def test_no_step_needs_the_coordinator(tmp_path: Path, mode: Mode) -> None:
    enough = threading.Event()
    # Steps are acknowledged without it for a lease: for all that are waited for.
    with Job(tmp_path, workers_min=2, mode=mode, lease_ttl_ms=120_000) as job:
        works = dict.fromkeys(("w0", "w1"), lambda name: train(job, name, enough))
        with Crew(works) as crew:
            try:
                version = wait_version(job, 20)
                before = job.ask(lambda: job.coordinator.core.record)
                job.stop_coordinator()
                version = wait_version(job, version + 100)
                job.start_coordinator()
                job.wait_workers(2, WorkerState.MEMBER)
                assert job.ask(lambda: job.coordinator.core.record) == before
                # A change after the restart reaches everybody.
                if mode is not Mode.BSP:
                    job.run(
                        job.coordinator.set_mode(ModeTerms(Mode.BSP, 0), timeout_s=30)
                    )
                wait_version(job, version + 20)
            finally:
                enough.set()
            step_counts = crew.results()
        record = job.wait_record(lambda record: not record.members)
        assert record.departed_step_count == sum(step_counts.values())
