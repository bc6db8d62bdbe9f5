"""Jobs that are slow for a reason, each a real one in this process: is it named?

The workers train until the coordinator's own sentence names the cause, or for so long
that it never would. `make soak` runs those that are slow: what is said is decided from
numbers in `tests/unit/psserver/coordinator/core/test_diagnosis.py`.
"""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from psserver.coordinator.rpc.public_control import PublicControl
from psserver.edge.checkpoint_interval import CheckpointInterval
from pswire.addresses import Address, parse_address
from pswire.membership import Mode
from pswire.status_document import Document, status_document
from tests.doubles.fault_proxy import FaultProxy
from tests.integration.job import Crew, Job, connect

LIMIT_S = 90.0
"""Within which a cause has to be named: some reports take seconds on a busy machine."""

SLOW_S = 0.12
"""What is slow in a step takes so long."""


@pytest.fixture(autouse=True)
def quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports come ten times as often as people need them."""
    monkeypatch.setattr("psworker.member.session.WORK_INTERVAL_S", 0.2)
    monkeypatch.setattr(
        "psserver.shard.rpc.coordinator_client.PROGRESS_INTERVAL_S", 0.1
    )


class Samples(Dataset[torch.Tensor]):
    """Samples that take their time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.full((64,), index / 1e5)


class Trainer:
    """What all workers do; some of them something that takes long.

    Attributes:
        is_over: Set when they are to end.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.is_over = threading.Event()

    def worker(
        self,
        *,
        compute_s: float = 0.0,
        load_s: float = 0.0,
        has_loader: bool = True,
    ) -> Callable[[str], None]:
        def work(worker_id: str) -> None:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            loader = DataLoader(Samples(load_s), batch_size=1)
            with connect(self._job, worker_id, start_timeout_s=LIMIT_S) as ps:
                model, optimizer, loader = ps.prepare(model, optimizer, loader)
                while not self.is_over.is_set():
                    for batch in loader:
                        time.sleep(compute_s)
                        optimizer.zero_grad()
                        loss = model(batch).square().mean()
                        loss.backward()
                        optimizer.step()
                        ps.log(loss=loss)
                        if self.is_over.is_set():
                            break

        return work


def document_of(job: Job) -> Document:
    def look() -> Document:
        response = PublicControl(job.coordinator).status()
        document = status_document(response, job.address)
        json.dumps(document, allow_nan=False)
        return document

    return job.ask(look)


def wait_for(job: Job, is_wanted: Callable[[Document], bool]) -> Document:
    """Returns the first status that is as wanted."""
    deadline = time.monotonic() + LIMIT_S
    while not is_wanted(document := document_of(job)):
        assert time.monotonic() < deadline, document["diagnosis"]
        time.sleep(0.02)
    return document


def named(
    job: Job,
    cause: str,
    works: dict[str, Callable[[str], None]],
    trainer: Trainer,
    *,
    who: Sequence[str] = (),
) -> Document:
    """The status of a job as soon as its cause is named, and these workers for it."""

    def is_named(found: Document) -> bool:
        diagnosis = found["diagnosis"]
        return bool(diagnosis["cause"] == cause and diagnosis["who"] == [*who])

    with Crew(works) as crew:
        try:
            return wait_for(job, is_named)
        finally:
            trainer.is_over.set()
            crew.results()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, shard_count=2, workers_min=2) as made:
        yield made


@pytest.mark.repeat
def test_a_straggler_is_named_and_what_it_takes(job: Job) -> None:
    trainer = Trainer(job)
    works = {"quick": trainer.worker(), "slow": trainer.worker(compute_s=SLOW_S)}
    document = named(job, "straggler", works, trainer, who=["slow"])
    assert document["diagnosis"]["sentence"].startswith(
        "slow is the straggler: its step takes "
    )
    quick, slow = document["workers"]
    assert slow["compute_ms"] > SLOW_S * 500 > quick["compute_ms"]
    assert quick["peer_wait_ms"] > quick["compute_ms"]
    assert slow["peer_wait_ms"] < quick["peer_wait_ms"]


@pytest.mark.repeat
@pytest.mark.parametrize(
    ("mode", "follows"),
    [
        (Mode.SSP, "and wait for slow at the staleness bound; "),
        (Mode.ASP, "and go on without slow in asp; "),
    ],
)
def test_a_straggler_is_named_where_workers_are_not_in_step(
    tmp_path: Path, mode: Mode, follows: str
) -> None:
    bound = 2 if mode.rules.takes_bound else None
    with Job(
        tmp_path, shard_count=2, workers_min=2, mode=mode, staleness_bound=bound
    ) as job:
        trainer = Trainer(job)
        works = {"quick": trainer.worker(), "slow": trainer.worker(compute_s=SLOW_S)}
        document = named(job, "straggler", works, trainer, who=["slow"])
        assert follows in document["diagnosis"]["sentence"]


@pytest.mark.repeat
def test_a_loader_that_does_not_keep_up_is_named(job: Job) -> None:
    trainer = Trainer(job)
    works = {"quick": trainer.worker(), "slow": trainer.worker(load_s=SLOW_S)}
    document = named(job, "waiting_for_data", works, trainer, who=["slow"])
    _, slow = document["workers"]
    assert slow["data_wait_ms"] > SLOW_S * 500  # of few steps, one in part
    assert slow["compute_ms"] < slow["data_wait_ms"]


@pytest.mark.repeat
def test_a_slow_link_is_named(tmp_path: Path) -> None:
    with ExitStack() as stack:
        proxies: list[FaultProxy] = []

        def slow(address: Address) -> Address:
            proxies.append(stack.enter_context(FaultProxy(str(address))))
            return parse_address(proxies[-1].address)

        job = stack.enter_context(
            Job(tmp_path, shard_count=1, workers_min=2, advertise={0: slow})
        )
        trainer = Trainer(job)
        works = {"one": trainer.worker(), "other": trainer.worker()}
        with Crew(works) as crew:
            try:
                wait_for(job, lambda found: found["phase"] == "running")
                proxies[0].slow(delay_s=SLOW_S / 2)
                document = wait_for(
                    job,
                    lambda found: found["diagnosis"]["sentence"].startswith(
                        "The link between workers and shards is slow: "
                    ),
                )
            finally:
                trainer.is_over.set()
                proxies[0].heal()
                crew.results()
        assert document["diagnosis"]["cause"] == "slow_link"
        # All that have said by now how long their steps take.
        who = document["diagnosis"]["who"]
        assert who
        assert set(who) <= {"one", "other"}


@pytest.mark.repeat
def test_too_few_workers_are_named_and_how_many_there_are(job: Job) -> None:
    trainer = Trainer(job)
    with Crew({"first": trainer.worker()}) as crew:
        sentence = "The job waits for 1 more worker: 1 of 2 has called prepare(); "
        document = wait_for(
            job, lambda found: found["diagnosis"]["sentence"].startswith(sentence)
        )
        assert document["diagnosis"]["cause"] == "too_few_workers"
        with Crew({"second": trainer.worker()}) as other:
            wait_for(job, lambda found: found["diagnosis"]["cause"] == "training")
            trainer.is_over.set()
            other.results()
        crew.results()
    over = wait_for(job, lambda found: found["diagnosis"]["cause"] == "finished")
    assert over["phase"] == "finished"


@pytest.mark.repeat
@pytest.mark.root
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("a disk that is small is mounted by root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with Job(
            tmp_path,
            shard_count=1,
            checkpoint_url=str(disk / "checkpoints"),
            checkpoint_interval=CheckpointInterval.parse("5steps"),
        ) as job:
            trainer = Trainer(job)
            document = named(job, "disk", {"w": trainer.worker()}, trainer)
            assert "No space left" in document["diagnosis"]["sentence"]
    finally:
        subprocess.run(["umount", str(disk)], check=True, capture_output=True)


def test_an_even_job_trains_and_shows_what_its_scripts_log(job: Job) -> None:
    trainer = Trainer(job)
    works = {name: trainer.worker(compute_s=0.01) for name in ("a", "b")}
    figures = ("received_bytes", "sent_bytes", "apply_ms")
    with Crew(works) as crew:
        try:
            document = wait_for(
                job,
                lambda found: (
                    all(
                        each["samples_per_s"] and each["loss"] is not None
                        for each in found["workers"]
                    )
                    and len(found["workers"]) == 2
                    and all(each[name] for each in found["shards"] for name in figures)
                    and found["steps_per_s"]
                    and found["diagnosis"]["cause"] == "training"
                ),
            )
        finally:
            trainer.is_over.set()
            crew.results()
    assert document["steps_per_s"] > 0
    assert document["metrics"].keys() == {"loss"}
    first, _ = document["workers"]
    assert first["step_count"] == first["sample_count"] > 0
    assert first["sent_bytes"] > 0
    assert first["resident_bytes"] > 1 << 20
    assert [each["encoding"] for each in first["encodings"]] == ["raw"]
    shard, _ = document["shards"]
    assert shard["received_bytes"] > 0
    assert shard["sent_bytes"] > 0
    assert shard["apply_ms"] > 0
    assert shard["chunk_count"] > 0
