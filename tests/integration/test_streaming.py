"""Streaming DiLoCo in a job, against its paper's algorithm for all workers at once."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psworker.strategies.diloco import StreamingDiLoCo
from tests.doubles.promised_numbers import FLOAT64_DEVIATION_MAX
from tests.integration.job import (
    Job,
    connect,
    deviation,
    key,
    run_workers,
    worker_behind,
)

BATCH_SIZE: Final = 2


def _model() -> nn.Module:
    """A model of three layers with five tensors, the same every time."""
    generator = torch.Generator().manual_seed(20261128)
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.Tanh(),
        nn.Linear(4, 4),
        nn.Tanh(),
        nn.Linear(4, 1, bias=False),
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def _inner(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    inputs, targets = batch
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def _copies(tensors: Any) -> list[torch.Tensor]:  # noqa: ANN401, any iterable
    return [each.detach().clone() for each in tensors]


def _loader(sample_count: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(sample_count, 3, generator=generator).double()
    targets = torch.randn(sample_count, 1, generator=generator).double()
    return DataLoader(TensorDataset(inputs, targets), batch_size=BATCH_SIZE)


@dataclass(frozen=True)
class Drawn:
    """A run of the algorithm, in its paper's letters.

    Attributes:
        worker_count: M.
        every: H, local steps between two pushes of the same fragment.
        fragments: P, each a list of places among the parameters.
        taken_after: tau, local steps from a push to taking what comes back.
        own_share: alpha, the share of a worker's own value that it keeps; None where it
            keeps what it has trained since the push, and nothing else.
        step_count: Local steps of each worker.
        inner: Its inner optimizer.
    """

    worker_count: int
    every: int
    fragments: list[list[int]]
    taken_after: int
    own_share: float | None
    step_count: int
    inner: str

    def due(self) -> set[int]:
        """Local steps after which some fragment is pushed: H / P apart."""
        count = len(self.fragments)
        cycles = range(self.step_count * count // self.every + 1)
        return {-(-number * self.every // count) for number in cycles} - {0}


Trace = list[list[torch.Tensor]]
"""The parameters of one worker after each of its local steps, and at the end."""


def simulate(
    run: Drawn, batches: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]
) -> list[Trace]:
    """Algorithm 2 of arXiv 2501.18512, for all workers, which are in step."""
    models = [_model() for _ in range(run.worker_count)]
    inner = [_inner(each, run.inner) for each in models]
    local = [list(each.parameters()) for each in models]
    shared = [nn.Parameter(each) for each in _copies(local[0])]
    outer = [
        torch.optim.SGD([shared[i] for i in part], lr=0.7, momentum=0.9, nesterov=True)
        for part in run.fragments
    ]
    anchors = [_copies(shared) for _ in models]
    traces: list[Trace] = [[] for _ in models]
    sent = [_copies(each) for each in local]
    behind = [0] * len(run.fragments)  # local steps since each was pushed
    under_way: tuple[int, int] | None = None  # since which step, and which fragment
    push_count = 0

    @torch.no_grad()
    def push() -> int:
        nonlocal push_count
        place = push_count % len(run.fragments)
        push_count += 1
        behind[place] = 0
        for i in run.fragments[place]:
            deltas = [anchors[m][i] - local[m][i] for m in range(len(models))]
            for m, own in enumerate(local):
                sent[m][i].copy_(own[i])
            shared[i].grad = torch.stack(deltas).mean(0)  # as many samples each
        outer[place].step()
        return place

    @torch.no_grad()
    def take(place: int) -> None:
        share = run.own_share
        for own, anchor, before in zip(local, anchors, sent, strict=True):
            for i in run.fragments[place]:
                if share is None:
                    own[i].copy_(shared[i] + (own[i] - before[i]))
                else:
                    own[i].copy_(share * own[i] + (1 - share) * shared[i])
                anchor[i].copy_(shared[i])

    for step in range(1, run.step_count + 1):
        for m, model in enumerate(models):
            _step(model, inner[m], batches[m][step - 1])
        behind = [each + 1 for each in behind]
        if under_way is not None and step >= under_way[0] + run.taken_after:
            take(under_way[1])
            under_way = None
        if step in run.due():
            under_way = step, push()
            if not run.taken_after:
                take(under_way[1])
                under_way = None
        for m, own in enumerate(local):
            traces[m].append(_copies(own))
    # There is no more data: everything is pushed, and taken at once.
    if under_way is not None:
        take(under_way[1])
    while any(behind):
        take(push())
    for m, own in enumerate(local):
        traces[m].append(_copies(own))
    return traces


@st.composite
def runs(draw: st.DrawFn) -> Drawn:
    fragment_count = draw(st.integers(1, 3))
    every = draw(st.integers(fragment_count, 12))
    return Drawn(
        worker_count=draw(st.integers(1, 3)),
        every=every,
        fragments=FRAGMENTS[fragment_count],
        # Less than what is between two pushes, of which one is under way at a time.
        taken_after=draw(st.integers(0, max(0, every // fragment_count - 1))),
        own_share=draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, None])),
        step_count=draw(st.integers(1, 30)),
        inner=draw(st.sampled_from(["sgd", "adamw"])),
    )


FRAGMENTS: Final = {
    1: [[0, 1, 2, 3, 4]],
    2: [[0, 1, 4], [2, 3]],
    3: [[0, 1], [2, 3], [4]],
}
"""Layers in turn, as the paper's strided fragments have them."""


def _train(run: Drawn, folder: Path) -> tuple[list[Any], list[Trace]]:
    """The batches and parameters of each worker of a job, in order of ranks."""

    def work(worker_id: str) -> tuple[int, list[Any], Trace]:
        model = _model()
        optimizer = _inner(model, run.inner)
        trace, batches = [], []
        with connect(job, worker_id) as ps:
            _, _, loader = ps.prepare(
                model,
                optimizer,
                _loader(run.worker_count * run.step_count * BATCH_SIZE),
                strategy=StreamingDiLoCo(
                    run.every,
                    fragment_count=len(run.fragments),
                    taken_after=run.taken_after,
                    own_share="trained" if run.own_share is None else run.own_share,
                    lr=0.7,
                ),
            )
            for inputs, targets in loader:
                batches.append((inputs, targets))
                _step(model, optimizer, (inputs, targets))
                trace.append(_copies(model.parameters()))
            trace.append(_copies(model.parameters()))
            # Once, though each sample is behind a push of every fragment.
            work_done = worker_behind(ps).work
            assert work_done.sample_count == BATCH_SIZE * run.step_count
            return ps.rank, batches, trace

    with Job(folder, workers_min=run.worker_count) as job:
        names = [f"w{number}" for number in range(run.worker_count)]
        results = sorted(run_workers(dict.fromkeys(names, work)).values())
    return [each[1] for each in results], [each[2] for each in results]


@settings(
    derandomize=True,
    deadline=None,
    max_examples=6,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(runs())
@example(
    Drawn(
        worker_count=2,
        every=8,
        fragments=FRAGMENTS[2],
        taken_after=3,
        own_share=None,
        step_count=19,
        inner="adamw",
    )
)
def test_it_is_the_paper_s_algorithm_step_by_step(
    tmp_path_factory: pytest.TempPathFactory, run: Drawn
) -> None:
    batches, traces = _train(run, tmp_path_factory.mktemp("job"))
    for found, wanted in zip(traces, simulate(run, batches), strict=True):
        assert len(found) == len(wanted)
        for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True), 1):
            assert deviation(mine, theirs) < FLOAT64_DEVIATION_MAX, f"after step {step}"


def test_who_has_no_data_follows_clocks_that_close_without_it_in_all_fragments(
    tmp_path: Path,
) -> None:
    """With backup workers: by the time that it is asked, several may be over."""
    step_count = 12
    has_all = threading.Event()
    differences: list[float] = []

    def work(worker_id: str) -> None:
        model = _model()
        optimizer = _inner(model, "sgd")
        strategy = StreamingDiLoCo(2, fragment_count=2, taken_after=0, own_share=0.0)
        with connect(job, worker_id) as ps:
            *_, loader = ps.prepare(
                model, optimizer, _loader(step_count * BATCH_SIZE), strategy=strategy
            )
            if worker_id == "w0":
                members = job.shards[0].model.core.on_shard
                batches = iter(loader)
                held = [next(batches) for _ in range(step_count)]
                has_all.set()
                until = time.monotonic() + 30
                while not job.ask(lambda: members.of(key("w1")).idle_sequence):
                    assert time.monotonic() < until
                    time.sleep(0.001)
                for batch in held:
                    _step(model, optimizer, batch)
                return
            engine = ps._engine
            assert engine is not None
            contribute = engine.contribute

            def late(push_nothing: Callable[[], None]) -> None:
                if not differences:
                    job.wait_pushed("w0", 5)
                contribute(push_nothing)
                assert ps.last_push is not None
                if ps.last_push.dropped:
                    differences.extend(
                        deviation(_copies(part.local), _copies(part.anchor))
                        for part in engine._anchors.fragments
                    )

            vars(engine)["contribute"] = late
            assert has_all.wait(30)
            assert not list(loader)

    with Job(tmp_path, workers_min=2, backup_worker_count=1) as job:
        run_workers(dict.fromkeys(("w0", "w1"), work))
    assert differences
    assert max(differences) < FLOAT64_DEVIATION_MAX
