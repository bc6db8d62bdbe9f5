"""`prepare(overlap=True)`: the numbers of `overlap=False`, bit for bit."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from pswire.addresses import Address, parse_address
from pswire.membership import Mode, StepAtomicity
from psworker.steps.overlap import sent_ahead
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.fault_proxy import DOWN, FaultProxy
from tests.integration.job import Job, connect, run_workers
from tests.integration.overlap_scripts import (
    SCRIPTS,
    STEP_COUNT,
    Accumulated,
    Script,
    Sgd,
)

Values = tuple[list[torch.Tensor], float]

small_chunks = cut_into(64, 512)
"""Cuts a model of a few KiB into a dozen chunks, on both sides alike."""


@pytest.fixture
def wasted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that chunks went ahead of, whether that was in vain."""
    found: list[bool] = []
    plain: Any = sent_ahead.SentAhead.complete

    def complete(*given: Any) -> sent_ahead.CompletedPush:  # noqa: ANN401
        completed: sent_ahead.CompletedPush = plain(*given)
        found.append(completed.is_wasted)
        return completed

    monkeypatch.setattr(sent_ahead.SentAhead, "complete", complete)
    return found


def trained(
    folder: Path,
    make: Callable[[], Script],
    *,
    overlap: bool,
    shard_count: int = 2,
    worker_count: int = 1,
    delay_s: float = 0.0,
    **settings: Any,  # noqa: ANN401, as the job has them
) -> Values:
    """Values after a script, and what the script itself has made of them."""
    names = [f"w{rank}" for rank in range(worker_count)]
    # Before threads are there, which share torch's seed.
    built = {name: (script := make(), *script.build()) for name in names}

    def work(worker_id: str) -> Values:
        script, models, optimizers = built[worker_id]
        with connect(job, worker_id) as ps:
            prepared = ps.prepare(
                *models, *optimizers, overlap=overlap, **script.prepare
            )
            count = len(models)
            script.run(
                list(prepared[:count]), list(prepared[count:]), int(worker_id[1:])
            )
            ps.wait()
            values = [p.detach().clone() for m in models for p in m.parameters()]
            return values, float(getattr(script, "total", 0.0))

    with ExitStack() as stack:

        def slowly(address: Address) -> Address:
            proxy = stack.enter_context(FaultProxy(str(address)))
            proxy.slow(delay_s=delay_s, ways=(DOWN,))
            return parse_address(proxy.address)

        job = stack.enter_context(
            Job(
                folder,
                shard_count=shard_count,
                workers_min=worker_count,
                advertise=dict.fromkeys(range(shard_count) if delay_s else (), slowly),
                **settings,
            )
        )
        results = run_workers(dict.fromkeys(names, work))
    return results["w0"]


def assert_same(ours: Values, theirs: Values) -> None:
    assert ours[1] == theirs[1]
    for mine, exact in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(mine, exact)


@pytest.mark.parametrize(
    "number", range(len(SCRIPTS)), ids=[make.__name__ for make in SCRIPTS]
)
def test_the_numbers_are_those_without_overlap(number: int, tmp_path: Path) -> None:
    make = SCRIPTS[number]
    counts = {"shard_count": 1 + number % 3, "worker_count": 1 + number % 2}

    # Values come late, so that whoever does not wait for them has the old ones.
    ours = trained(tmp_path / "on", make, overlap=True, delay_s=0.02, **counts)

    assert_same(ours, trained(tmp_path / "off", make, overlap=False, **counts))


@pytest.mark.parametrize("make", [Sgd, Accumulated])
def test_what_goes_ahead_is_not_sent_again(
    make: Callable[[], Script], wasted: list[bool], tmp_path: Path
) -> None:
    trained(tmp_path, make, overlap=True)

    # The first step shows what a step consists of.
    assert wasted == [False] * (STEP_COUNT - 1)


def test_a_script_that_changes_all_gradients_is_not_sent_ahead_for_ever(
    wasted: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain: Any = sent_ahead.SentAhead.send

    def send_at_once(ahead: sent_ahead.SentAhead, *given: Any) -> None:  # noqa: ANN401
        plain(ahead, *given)
        # Gradients as small as these may be changed before they are copied.
        for copying in ahead._copying:
            copying.result()

    monkeypatch.setattr(sent_ahead.SentAhead, "send", send_at_once)

    class Clipping(Script):
        def run(self, models: list[Any], optimizers: list[Any], rank: int) -> None:
            for step in range(14):
                self.step(models, optimizers, step, rank)

        def before_step(self, model: torch.nn.Module, step: int) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    trained(tmp_path, Clipping, overlap=True)

    assert wasted == [True] * 10
    told = [text for text in caplog.messages if "prepare(overlap=True)" in text]
    assert len(told) == 1
    assert "changed before step() in ten steps running" in told[0]


@pytest.mark.parametrize("atomicity", list(StepAtomicity))
@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_gives_one_worker_the_same_numbers(
    mode: Mode, atomicity: StepAtomicity, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "mode": mode,
        "staleness_bound": 1 if mode is Mode.SSP else None,
        "step_atomicity": atomicity,
    }

    ours = trained(tmp_path / "on", Script, overlap=True, **settings)

    assert_same(ours, trained(tmp_path / "off", Script, overlap=False, **settings))
