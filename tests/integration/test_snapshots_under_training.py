"""Snapshots during fast training: each is one version of all shards."""

import threading
from pathlib import Path
from typing import Final

import torch
from torch import nn

import psworker
from psworker.snapshots.snapshot import Snapshot
from tests.doubles.chunk_sizes import cut_into
from tests.integration.job import Crew, Job, connect

SNAPSHOT_COUNT: Final = 200
WORKERS: Final = ("w0", "w1")

small_chunks = cut_into(64, 128)
"""Gives every shard several chunks of a model of 1 KiB."""


def countdown_model() -> nn.Module:
    return nn.ParameterList([torch.zeros(100), torch.zeros(7, 9), torch.zeros(())])


def step_down(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Takes 1 from every element, with SGD and a learning rate of 1."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def train_until(job: Job, worker_id: str, enough: threading.Event) -> int:
    """Steps until told, then both to the same clock; the number of steps."""
    model = countdown_model()
    with connect(job, worker_id) as ps:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = ps.prepare(model, optimizer)
        while not enough.is_set():
            step_down(model, optimizer)
        return ps.clock


def assert_one_version(snapshot: Snapshot, generation: int) -> None:
    """Every element is the clock, and the clock is the version's."""
    for name, tensor in snapshot.state_dict().items():
        assert torch.equal(tensor, torch.full_like(tensor, -snapshot.clock)), name
    if snapshot.generation == generation:
        assert snapshot.version == len(WORKERS) * snapshot.clock


def test_two_hundred_snapshots_of_fast_training(tmp_path: Path) -> None:
    enough = threading.Event()
    with Job(tmp_path, shard_count=3, workers_min=len(WORKERS)) as job:
        works = dict.fromkeys(WORKERS, lambda w: train_until(job, w, enough))
        with Crew(works) as crew, psworker.SnapshotReader(job.address) as reader:
            try:
                job.wait_pushed("w0", 1)
                snapshots = [reader.latest(timeout=30)]
                while len(snapshots) < SNAPSHOT_COUNT:
                    # Now and then one that trainers must have made a step for.
                    is_newer = len(snapshots) % 5 == 0
                    snapshots.append(
                        reader.wait_newer(snapshots[-1].version, timeout=30)
                        if is_newer
                        else reader.latest(timeout=30)
                    )
            finally:
                enough.set()
            last_clock = max(crew.results().values())
            final = reader.latest(timeout=30)

        for snapshot in snapshots:
            assert_one_version(snapshot, generation=1)
        clocks = [snapshot.clock for snapshot in snapshots]
        assert clocks == sorted(clocks)
        assert len(set(clocks)) >= SNAPSHOT_COUNT // 5
        assert_one_version(final, generation=1)
        assert final.clock == last_clock
        steps_per_snapshot = (clocks[-1] - clocks[0]) / SNAPSHOT_COUNT
        print(f"{steps_per_snapshot:.1f} steps between two snapshots")


def test_readers_at_once_share_cuts_and_wait_for_newer_versions(tmp_path: Path) -> None:
    enough = threading.Event()

    def read(name: str) -> list[Snapshot]:
        found = []
        with psworker.SnapshotReader(job.address) as reader:
            version = 0
            for _ in range(10):
                found.append(reader.wait_newer(version, timeout=30))
                version = found[-1].version
        return found

    with Job(tmp_path, shard_count=2, workers_min=len(WORKERS)) as job:
        works = dict.fromkeys(WORKERS, lambda w: train_until(job, w, enough))
        with Crew(works) as trainers:
            try:
                job.wait_pushed("w0", 1)
                with Crew(dict.fromkeys(("r0", "r1", "r2"), read)) as readers:
                    found = readers.results()
            finally:
                enough.set()
            trainers.results()
        hosts = job.shards
        image_counts = job.ask(lambda: [len(host.images._images) for host in hosts])

    for snapshots in found.values():
        versions = [snapshot.version for snapshot in snapshots]
        assert versions == sorted(set(versions))
        for snapshot in snapshots:
            assert_one_version(snapshot, generation=1)
    assert all(count <= 2 for count in image_counts), "two images at most"


def test_snapshots_while_workers_come_and_go(tmp_path: Path) -> None:
    """Fences of membership and cuts interleave; the version counts every step."""
    enough, has_come_twice = threading.Event(), threading.Event()

    def come_and_go(worker_id: str) -> int:
        step_count = 0
        while not enough.is_set():
            model = countdown_model()
            with connect(job, worker_id) as ps:
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                model, optimizer = ps.prepare(model, optimizer)
                for _ in range(5):
                    step_down(model, optimizer)
                step_count += 5
                if step_count >= 10:
                    has_come_twice.set()
        return step_count

    with Job(tmp_path, shard_count=2) as job:
        works = {
            "w0": lambda w: train_until(job, w, enough),
            "visitor": come_and_go,
        }
        with Crew(works) as crew, psworker.SnapshotReader(job.address) as reader:
            try:
                job.wait_pushed("w0", 1)
                snapshots = [reader.latest(timeout=30) for _ in range(40)]
                assert has_come_twice.wait(60)
            finally:
                enough.set()
            step_count = sum(crew.results().values())
            final = reader.latest(timeout=30)
        clock = job.ask(lambda: job.shards[0].model.core.clocks.applied_clock)
        starts = job.ask(lambda: job.coordinator.core.roster.incarnations)
        assert starts["visitor"] > 1

    for snapshot in snapshots:
        assert_one_version(snapshot, generation=0)
        assert snapshot.clock <= snapshot.version <= 2 * snapshot.clock
    versions = [snapshot.version for snapshot in snapshots]
    assert versions == sorted(versions)
    assert final.clock == clock
    assert final.version == step_count
