"""A job that goes on from a checkpoint has the numbers of one that never ended."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fsspec.config
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psserver.edge.checkpoint_interval import CheckpointInterval
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import MANIFEST, part_name
from pswire.membership import Mode, StepAtomicity
from pswire.torch_types import buffer_of
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.doubles.s3_server import BUCKET, Fault, S3Server
from tests.integration.job import Crew, Job, connect

SAMPLE_COUNT = 48
BATCH_SIZE = 4
Tensors = dict[str, torch.Tensor]
NEVER = CheckpointInterval(duration_ms=3_600_000)


class Words(nn.Module):
    """A table that is sent rows, buffers, and parameters of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 8, sparse=True)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Linear(8, 40).bfloat16()
        self.head = nn.Linear(40, 2)

    def forward(self, indexes: torch.Tensor) -> torch.Tensor:
        embedded = self.norm(self.table(indexes).mean(1))
        hidden: torch.Tensor = self.body(embedded.bfloat16()).float()
        found: torch.Tensor = self.head(hidden.tanh())
        return found


class Kind(NamedTuple):
    """What a job is, and what its script gives to `prepare`."""

    settings: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}


KINDS = {
    "as it is": Kind(),
    "two phases": Kind({"step_atomicity": StepAtomicity.CLOCK}),
    "clipped": Kind(options={"clip_grad_norm": 0.05}),
}

OTHERS = {
    "ssp": Kind({"mode": Mode.SSP, "staleness_bound": 1}),
    "asp, compensated": Kind({"mode": Mode.ASP, "delay_compensation": 0.1}),
    "compressed": Kind(options={"compression": "int8"}),
}
"""Whose numbers differ from run to run, or whose errors of compression are dropped."""


def train(job: Job, worker_id: str, epoch_count: int, kind: Kind) -> int:
    """The script: its number of epochs is all that differs. Returns its steps."""
    with connect(job, worker_id) as ps:
        # Its own: workers are threads, which draw from one global generator.
        generator = torch.Generator().manual_seed(3)
        model = Words()
        for each in model.parameters():
            drawn = torch.randn(each.shape, generator=generator) / 4
            each.data.copy_(drawn)
        dense = [p for n, p in model.named_parameters() if not n.startswith("table")]
        adam = torch.optim.Adam(dense, lr=0.01)
        sparse = torch.optim.SparseAdam(list(model.table.parameters()), lr=0.05)
        indexes = torch.randint(500, (SAMPLE_COUNT, 6), generator=generator)
        data = TensorDataset(indexes, indexes.sum(1) % 2)
        loader: Any = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
        model, adam, sparse, loader = ps.prepare(
            model, adam, sparse, loader, **kind.options
        )
        step_count = 0
        for _ in range(epoch_count):
            for words, labels in loader:
                nn.functional.cross_entropy(model(words), labels).backward()
                for each in (adam, sparse):
                    each.step()
                    each.zero_grad()
                step_count += 1
        return step_count


def run(
    folder: Path,
    name: str,
    epoch_count: int,
    kind: Kind,
    *,
    shard_count: int = 2,
    url: str = "",
) -> tuple[Tensors, int]:
    """Runs a job to its end; what its shards have then, and its workers' steps.

    Args:
        folder: For its checkpoints, with which it begins if there are any.
        name: For its state, which no other run has.
        epoch_count: Epochs of the script.
        kind: What it is.
        shard_count: Shards.
        url: For its checkpoints, if not in the folder.
    """
    with Job(
        folder / name,
        shard_count=shard_count,
        workers_min=2,
        checkpoint_url=url or str(folder / "checkpoints"),
        checkpoint_interval=NEVER,
        **kind.settings,
    ) as job:
        works = dict.fromkeys(
            "ab", lambda worker_id: train(job, worker_id, epoch_count, kind)
        )
        with Crew(works) as crew:
            step_count = sum(crew.results().values())
        job.run(job.coordinator.checkpoints.save(30))
        return job.ask(lambda: tensors_of(job)), step_count


def tensors_of(job: Job) -> Tensors:
    """All numbers of all shards: values, masters and state."""
    return {
        name: tensor
        for host in job.shards
        for chunk in host.model.chunks
        for name, tensor in host.model.engine.image_of(chunk.index).named(chunk.index)
    }


def digest_of(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(buffer_of(tensor))
    return digest.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_bits_of_one_that_never_ended(tmp_path: Path, kind: str) -> None:
    undisturbed, step_count = run(tmp_path / "one", "state", 3, KINDS[kind])
    assert step_count == 3 * SAMPLE_COUNT // BATCH_SIZE
    assert any(name.startswith("master/") for name in undisturbed)
    assert any("/exp_avg_sq" in name for name in undisturbed)

    counts = [
        run(tmp_path / "more", f"state-{epochs}", epochs, KINDS[kind])[1]
        for epochs in (1, 2)
    ]
    resumed, count = run(tmp_path / "more", "state-3", 3, KINDS[kind])

    assert [*counts, count] == [SAMPLE_COUNT // BATCH_SIZE] * 3
    assert digest_of(resumed) == digest_of(undisturbed)


@pytest.mark.parametrize("begins_with_the_open_epoch", [True, False])
def test_schedulers_of_epochs_are_where_they_were(
    tmp_path: Path, begins_with_the_open_epoch: bool
) -> None:
    """The last push of an epoch has not the step that the script makes at its end."""

    def rates(worker_id: str, job: Job, epoch_count: int) -> list[float]:
        found = []
        with connect(job, worker_id) as ps:
            model = nn.Linear(2, 1)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
            scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            loader: Any = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
            model, optimizer, scheduler, loader = ps.prepare(
                model, optimizer, scheduler, loader
            )
            for epoch in range(
                ps.epoch if begins_with_the_open_epoch else 0, epoch_count
            ):
                loader.set_epoch(epoch)
                for (batch,) in loader:
                    model(batch).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(optimizer.param_groups[0]["lr"])
                scheduler.step()
        return found

    found: dict[str, list[float]] = {"a": [], "b": []}
    for epoch_count in (1, 2, 4):
        with Job(
            tmp_path / f"state-{epoch_count}",
            workers_min=2,
            checkpoint_url=str(tmp_path / "checkpoints"),
            checkpoint_interval=NEVER,
        ) as job:
            works = {
                name: lambda name, job=job, count=epoch_count: rates(name, job, count)
                for name in found
            }
            with Crew(works) as crew:
                for name, more in crew.results().items():
                    found[name] += more
            job.run(job.coordinator.checkpoints.save(30))
    expected = [0.5**epoch for epoch in range(4) for _ in "12"]
    assert found == {"a": expected, "b": expected}


def test_on_other_shards_it_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    kind = KINDS["as it is"]
    undisturbed, _ = run(tmp_path / "one", "state", 2, kind, shard_count=1)
    run(tmp_path / "more", "first", 1, kind, shard_count=3)

    resumed, _ = run(tmp_path / "more", "second", 2, kind, shard_count=1)

    assert resumed.keys() == undisturbed.keys()
    for name, tensor in undisturbed.items():
        found = resumed[name].double()
        # A last bit of float32 decides how a value halfway is rounded to 16 bits.
        allowed = DEVIATION_MAX if tensor.element_size() > 2 else 2**-8
        largest = float(tensor.double().abs().max())
        assert (found - tensor.double()).abs().max() <= allowed * largest, name


def test_from_a_store_that_fails_it_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs", reason="pip install 'paramserver[s3]'")
    kind = KINDS["as it is"]
    undisturbed, _ = run(tmp_path / "one", "state", 2, kind)
    with S3Server().running() as server:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "any")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        options = {"read_timeout": 2.0, "retries": {"max_attempts": 0}}
        monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": options})
        s3fs.S3FileSystem.clear_instance_cache()
        server.fail("PUT", MANIFEST, Fault.ANSWER_LOST)
        server.fail("PUT", part_name(0, 2), Fault.HANGS)
        server.fail("PUT", part_name(1, 2), Fault.DELAYED)
        server.fail("GET", part_name(0, 2), Fault.CUT)
        server.fail("LIST", "", Fault.ANSWER_LOST)
        url = f"s3://{BUCKET}/any folder"
        run(tmp_path, "first", 1, kind, url=url)

        resumed, count = run(tmp_path, "second", 2, kind, url=url)

        assert count == SAMPLE_COUNT // BATCH_SIZE
        assert digest_of(resumed) == digest_of(undisturbed)
        for name in CheckpointFolder(url).names():
            assert CheckpointFolder(url).verify(name) == ()
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("kind", OTHERS)
def test_every_kind_of_job_goes_on(tmp_path: Path, kind: str) -> None:
    _, first_count = run(tmp_path, "first", 1, OTHERS[kind])
    _, count = run(tmp_path, "second", 2, OTHERS[kind])
    assert first_count == count == SAMPLE_COUNT // BATCH_SIZE
    folder = CheckpointFolder(str(tmp_path / "checkpoints"))
    found = folder.newest_good()
    assert found.manifest is not None
    assert found.manifest.version == 2 * 2 * count
