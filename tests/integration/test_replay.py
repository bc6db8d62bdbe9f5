"""Recordings of jobs of four workers and two shards, replayed to the same bits."""

import hashlib
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import psworker
from psctl.failures import CommandError
from psctl.replay import ReplayReport, replay
from psserver.edge.checkpoint_interval import CheckpointInterval
from psserver.shard.host.recording import RecordingReader
from psserver.shard.host.replaying import Until
from pswire.aggregation import Aggregation, BadGradientPolicy
from pswire.exit_codes import ExitCode
from pswire.membership import Mode
from pswire.torch_types import buffer_of
from tests.doubles.chunk_sizes import cut_into
from tests.integration.job import Job, connect, run_workers
from tests.integration.test_modes import set_mode

SEED: Final = 20261130
STEP_COUNT: Final = 6
WORKERS: Final = ("w0", "w1", "w2", "w3")
ROW_COUNT: Final = 40
ONE_AFTER_THE_OTHER: Final = threading.Lock()
"""Of workers that are threads and share torch's random numbers."""

Optimizers = list[torch.optim.Optimizer]


class Model(nn.Module):
    """A table, layers and buffers, cut into chunks that cut rows too."""

    def __init__(self, *, is_sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        with ONE_AFTER_THE_OTHER:
            torch.manual_seed(SEED)
            self.table = nn.Embedding(ROW_COUNT, 7, sparse=is_sparse)
            self.first = nn.Linear(7, 24)
            self.norm = nn.BatchNorm1d(24)
            self.last = nn.Linear(24, 5)
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inner = self.norm(torch.tanh(self.first(self.table(ids).mean(1))))
        out: torch.Tensor = self.last(inner)
        return out


def adam(model: Model) -> Optimizers:
    return [torch.optim.Adam(model.parameters(), lr=0.01)]


def momentum(model: Model) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def table_apart(model: Model) -> Optimizers:
    dense = [*model.first.parameters(), *model.last.parameters()]
    return [
        torch.optim.SparseAdam([model.table.weight], lr=0.02),
        torch.optim.Adam(dense, lr=0.01),
    ]


@dataclass(frozen=True)
class Case:
    """How a job trains."""

    mode: Mode
    optimizers: Callable[[Model], Optimizers] = momentum
    is_sparse: bool = False
    dtype: torch.dtype = torch.float32
    prepare: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)


CASES: Final = {
    "bsp-adam": Case(Mode.BSP, adam),
    "bsp-momentum-int8-clipped": Case(
        Mode.BSP, prepare={"compression": "int8", "clip_grad_norm": 0.1}
    ),
    "bsp-bf16-trimmed-mean": Case(
        Mode.BSP,
        adam,
        dtype=torch.bfloat16,
        job={"aggregation": Aggregation.parse("trimmed-mean:0.25")},
    ),
    "quorum-adam": Case(Mode.QUORUM, adam, job={"quorum": 2, "grace_window_s": 0.001}),
    "ssp-sparse": Case(Mode.SSP, table_apart, is_sparse=True),
    "ssp-sparse-momentum-bf16": Case(Mode.SSP, is_sparse=True, dtype=torch.bfloat16),
    "asp-int8": Case(Mode.ASP, adam, prepare={"compression": "int8"}),
    "asp-topk-both": Case(
        Mode.ASP,
        prepare={"compression": psworker.Compression("topk", "topk", ratio=0.2)},
    ),
    "asp-late-gradients": Case(
        Mode.ASP, job={"is_staleness_scaled": True, "delay_compensation": 0.5}
    ),
    "asp-norm-limit": Case(
        Mode.ASP,
        adam,
        job={
            "gradient_norm_max": 0.5,
            "bad_gradient_policy": BadGradientPolicy.CLIP,
        },
    ),
}

small_chunks = cut_into(64, 512)

NEVER: Final = CheckpointInterval(duration_ms=3_600_000)


@dataclass(frozen=True)
class Trained:
    """A job that has ended, and what its shards held last."""

    folder: Path
    shards: list[str]
    snapshot: psworker.Snapshot


AtStep = Callable[[Job, str, int, Optimizers, Model], None]
"""What a worker does before a step, given its id and the step."""


def train(
    folder: Path,
    case: Case,
    at_step: AtStep = lambda job, worker_id, step, optimizers, model: None,
    *,
    checkpoints: Path | None = None,
) -> Trained:
    def work(worker_id: str) -> None:
        number = WORKERS.index(worker_id)
        with connect(job, worker_id) as ps:
            model = Model(is_sparse=case.is_sparse, dtype=case.dtype)
            optimizers = case.optimizers(model)
            prepared = ps.prepare(model, *optimizers, **case.prepare)
            inner, *outer = prepared
            for step in range(STEP_COUNT):
                generator = torch.Generator().manual_seed(SEED + 10 * step + number)
                ids = torch.randint(ROW_COUNT, (3 + number, 4), generator=generator)
                at_step(job, worker_id, step, outer, model)
                for each in outer:
                    each.zero_grad()
                inner(ids).square().mean().backward()
                for each in outer:
                    each.step(weight=3 + number)
            ps.wait()

    with Job(
        folder / "state",
        workers_min=len(WORKERS),
        mode=case.mode,
        record=folder / "recordings",
        staleness_bound=2 if case.mode is Mode.SSP else None,
        checkpoint_url=str(checkpoints) if checkpoints else None,
        checkpoint_interval=NEVER if checkpoints else None,
        **case.job,
    ) as job:
        run_workers(dict.fromkeys(WORKERS, work))
        with psworker.SnapshotReader(job.address) as reader:
            snapshot = reader.latest()
        if checkpoints:
            job.run(job.coordinator.checkpoints.save(30))
        shards = job.ask(lambda: [_digest(host.model) for host in job.shards])
    return Trained(folder / "recordings", shards, snapshot)


def _digest(model: Any) -> str:  # noqa: ANN401, of a shard
    found = hashlib.sha256()
    for chunk in model.chunks:
        found.update(model.engine.vectors.read(chunk.index))
    return found.hexdigest()


WHOLE: Final = Until()


def replayed(folder: Path, until: Until = WHOLE) -> ReplayReport:
    before = torch.get_num_threads()
    try:
        return replay([folder], until=until, norm_max=None, shows_pushes=True)
    finally:
        torch.set_num_threads(before)


SEEN_BESIDE: Final = {"ssp-sparse-momentum-bf16", "asp-int8"}
"""Cases whose parts others have."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.repeat if name in SEEN_BESIDE else ())
        for name in CASES
    ],
)
def test_a_replay_has_the_bits_of_the_shards(tmp_path: Path, name: str) -> None:
    trained = train(tmp_path, CASES[name])

    found = replayed(trained.folder)

    assert found.is_sound, found.to_text()
    assert [each.digest for each in found.shards] == trained.shards
    assert {each.version for each in found.shards} == {trained.snapshot.version}
    state = trained.snapshot.state_dict()
    values = b"".join(bytes(buffer_of(state[name])) for name in sorted(state))
    assert found.digest == hashlib.sha256(values).hexdigest()
    pushes = found.shards[0].pushes
    steps = STEP_COUNT * len(WORKERS) * len(CASES[name].optimizers(_plain(name)))
    assert len({each.push for each in pushes if each.outcome}) >= steps
    assert found.first_nonfinite is None


def test_it_stops_where_a_snapshot_was_taken(tmp_path: Path) -> None:
    """Of a moment at which the other workers go on."""
    taken = []

    def at_step(
        job: Job, worker_id: str, step: int, optimizers: Optimizers, model: Model
    ) -> None:
        if worker_id == "w0" and step == STEP_COUNT // 2:
            with psworker.SnapshotReader(job.address) as reader:
                taken.append(reader.latest())

    trained = train(tmp_path, Case(Mode.ASP, adam), at_step)
    (snapshot,) = taken
    assert 0 < snapshot.version < trained.snapshot.version
    nothing = replayed(trained.folder, Until(version=0))
    assert [each.chunk_update_count for each in nothing.shards] == [0, 0]

    found = replayed(trained.folder, Until(version=snapshot.version))

    assert found.is_sound
    assert {each.version for each in found.shards} == {snapshot.version}
    out = tmp_path / "model.safetensors"
    found.save(out, None)
    state = snapshot.state_dict()
    assert {n: t.tolist() for n, t in load_file(out).items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }


def test_state_groups_and_modes_that_change_are_in_it(tmp_path: Path) -> None:
    def at_step(
        job: Job, worker_id: str, step: int, optimizers: Optimizers, model: Model
    ) -> None:
        (optimizer,) = optimizers
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 3:
            optimizer.add_param_group({"params": model.last.parameters(), "lr": 0.01})
        if step == 4 and worker_id == "w0":
            set_mode(job, Mode.BSP)

    def without_the_last(model: Model) -> Optimizers:
        return [torch.optim.Adam(model.first.parameters(), lr=0.01)]

    trained = train(tmp_path, Case(Mode.ASP, without_the_last), at_step)

    found = replayed(trained.folder)

    assert found.is_sound, found.to_text()
    assert [each.digest for each in found.shards] == trained.shards
    reader = RecordingReader(found.shards[0].path)
    kinds = Counter(entry.kind for entry in reader.entries())
    assert min(kinds[each] for each in ("state", "terms", "record", "done")) > 0, kinds
    assert kinds["end"] == 1


def test_a_job_that_went_on_from_a_checkpoint_has_a_part_of_its_own(
    tmp_path: Path,
) -> None:
    """The folder of checkpoints may be gone by then."""
    case = Case(Mode.ASP, adam, dtype=torch.bfloat16)
    first = train(tmp_path / "1", case, checkpoints=tmp_path / "saved")
    second = train(tmp_path / "2", case, checkpoints=tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")
    assert second.snapshot.version == 2 * first.snapshot.version

    before = replayed(second.folder, Until(version=first.snapshot.version))
    after = replayed(second.folder)

    assert [each.digest for each in before.shards] == first.shards
    assert [each.push_count for each in before.shards] == [0, 0]
    assert [each.digest for each in after.shards] == second.shards
    assert after.is_sound


def test_what_went_wrong_is_found_and_named(tmp_path: Path) -> None:
    """A rate that a script gets wrong at its fourth step."""

    def at_step(
        job: Job, worker_id: str, step: int, optimizers: Optimizers, model: Model
    ) -> None:
        if step == 3:
            optimizers[0].param_groups[0]["lr"] = 1e39

    trained = train(tmp_path, Case(Mode.BSP), at_step)

    found = replayed(trained.folder)

    assert found.is_sound, found.to_text()
    bad = found.first_nonfinite
    assert bad is not None
    assert (bad.clock, len(bad.pushes)) == (4, len(WORKERS))
    assert "last.weight" in bad.nonfinite
    said = "first value that is not finite: clock 4: push 4 of w0/1, push 4 of w1/1"
    assert said in found.to_text()
    skipped = [row for row in rows_of(found) if row["outcome"] == "skipped"]
    assert {row["clock"] for row in skipped} == {5, 6}
    assert {row["gradient_norm"] for row in skipped} == {None}

    before = replayed(trained.folder, Until(clock=3))
    assert before.first_nonfinite is None
    norms = {row["clock"]: row["update_norm"] for row in rows_of(before)}
    assert set(norms) == {1, 2, 3}
    assert all(0 < norm < 1 for norm in norms.values())
    high = max(norms, key=lambda clock: norms[clock])
    limited = replace(before, norm_max=norms[high] * 0.999)
    assert limited.first_large is not None
    assert limited.first_large.norm == norms[high]
    assert replace(before, norm_max=norms[high]).first_large is None

    one, two = sorted(trained.folder.iterdir())
    alone = replay([two], until=WHOLE, norm_max=None, shows_pushes=False)
    assert (alone.missing, alone.digest) == ((0,), "")
    with pytest.raises(CommandError, match="no recording of shard 0"):
        alone.save(tmp_path / "part.safetensors", None)
    with pytest.raises(CommandError, match="not of one run of a job"):
        replay([one, trained.folder], until=WHOLE, norm_max=None, shows_pushes=False)

    changed = bytearray(one.read_bytes())
    last = list(RecordingReader(one).entries())[-1]
    changed[last.place + 30] ^= 1
    one.write_bytes(changed)
    damaged = replayed(trained.folder)
    assert damaged.exit_code is ExitCode.ERROR
    assert f"entry {last.number}, at byte {last.place}, is damaged" in damaged.to_text()
    assert damaged.shards[0].digest == trained.shards[0]


def rows_of(report: ReplayReport) -> list[dict[str, Any]]:
    rows = report.to_json()["pushes"]
    assert isinstance(rows, list)
    return rows


def _plain(name: str) -> Model:
    return Model(is_sparse=CASES[name].is_sparse, dtype=CASES[name].dtype)
