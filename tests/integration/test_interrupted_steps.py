"""What interrupts a step costs it nothing, and counts it once or not at all."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import psworker
from psworker.connection import Connection
from psworker.errors import PsError
from tests.integration.interruptions import AtLine, Interrupted, Line, text_of
from tests.integration.job import Job, connect, deviation

# An interruption before a coroutine is handed to the loop leaves it to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited",
    "ignore:Exception ignored in. <coroutine",
)

LOCAL_LINE_STRIDE = 8
LINE_STRIDE = 2
"""Of a step's lines every other one is interrupted: an attempt costs some 20 ms."""


@pytest.fixture(name="job")
def one_worker_job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path / "state") as job:
        yield job


class Pair:
    """A model that a job trains, and one that this process trains by itself."""

    def __init__(self, ps: Connection, *, overlap: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.ps = ps
        self.alone = copy.deepcopy(model)
        self.plain = torch.optim.Adam(self.alone.parameters(), lr=0.01)
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = ps.prepare(
            model, torch.optim.Adam(model.parameters(), lr=0.01), overlap=overlap
        )
        self.clock = 0
        self._generator = torch.Generator().manual_seed(0)

    def go_backward(self) -> None:
        """Both, each with its own values: they must be equal."""
        x = torch.randn(3, 4, generator=self._generator)
        self.optimizer.zero_grad()
        ours = self.model(x)
        self._count()
        self.plain.zero_grad()
        theirs = self.alone(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        ours.square().mean().backward()
        theirs.square().mean().backward()

    def _count(self) -> None:
        """Steps by itself if the job has: at most once, and never out of sight."""
        clock = self.ps.clock
        assert clock in (self.clock, self.clock + 1)
        if clock > self.clock:
            self.plain.step()
        self.clock = clock

    def check(self) -> None:
        self.ps.wait()
        self._count()
        ours = [each.detach() for each in self.model.parameters()]
        theirs = [each.detach() for each in self.alone.parameters()]
        assert deviation(ours, theirs) <= 1e-5
        state = self.optimizer.state_dict()["state"]
        for index, expected in self.plain.state_dict()["state"].items():
            assert float(state[index]["step"]) == float(expected["step"]) == self.clock
            torch.testing.assert_close(state[index]["exp_avg"], expected["exp_avg"])


def step_that_counts(pair: Pair) -> None:
    """The next gradient is pushed, whatever became of the one before."""
    before = pair.clock
    pair.optimizer.step(weight=1)
    assert pair.ps.clock == before + 1


def retry(pair: Pair) -> None:
    before = pair.clock
    pair.optimizer.step(weight=1)
    pair.ps.wait()
    assert pair.ps.clock == before + 1


AFTERWARDS: tuple[Callable[[Pair], object], ...] = (
    lambda pair: None,
    retry,
    lambda pair: pair.ps.clock,
    lambda pair: pair.optimizer.state_dict(),
    lambda pair: pair.ps.wait(),
    lambda pair: pair.ps.last_push,
)


def lines_of_step(pair: Pair) -> list[Line]:
    """Those of a step with nothing to settle, of which it has some hundred."""
    pair.go_backward()
    with AtLine() as seen:
        pair.optimizer.step(weight=1)
    lines = list(seen.lines)
    assert len(lines) > 100
    return lines[::LINE_STRIDE]


def is_of_entrance(line: Line) -> bool:
    """Whether the step may be over there: the same step again is then another one."""
    return line[0].endswith(
        ("user_calls.py", "tracebacks.py", "psworker/optim/optimizer.py")
    )


@pytest.mark.parametrize(
    "shift", [0, *(pytest.param(n, marks=pytest.mark.repeat) for n in range(1, 6))]
)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_an_error_at_any_line_of_a_step_counts_it_once_or_not_at_all(
    job: Job, overlap: bool, shift: int
) -> None:
    """What comes next is any of `AFTERWARDS`, with each `shift` another one."""
    with connect(job, "w0") as ps:
        pair = Pair(ps, overlap=overlap)
        reached_count = 0
        for number, line in enumerate(lines_of_step(pair)):
            pair.go_backward()
            with AtLine(line) as at:
                try:
                    pair.optimizer.step(weight=1)
                except Interrupted:
                    reached_count += 1
            try:
                if at.is_reached and not is_of_entrance(line):
                    AFTERWARDS[(number + shift) % len(AFTERWARDS)](pair)
                pair.go_backward()
                step_that_counts(pair)
            except (AssertionError, PsError) as error:
                raise AssertionError(text_of(line)) from error
        pair.check()
        assert reached_count > 50
        assert pair.clock > reached_count // 3


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_a_handler_that_calls_at_any_line_of_a_step_leaves_the_step_alone(
    job: Job, overlap: bool
) -> None:
    calls: tuple[Callable[[Pair], object], ...] = (
        lambda pair: pair.optimizer.state_dict(),
        lambda pair: pair.ps.clock,
        lambda pair: pair.optimizer.step(weight=1),
        lambda pair: pair.ps.close(),
        lambda pair: pair.optimizer.load_state_dict({}),
        lambda pair: pair.ps.wait(),
        lambda pair: pair.ps.last_push,
        lambda pair: pair.optimizer.add_param_group({"params": []}),
        lambda pair: pair.ps.prepare(pair.model),
        lambda pair: repr(pair.ps),
    )
    refusals: set[str] = set()
    with connect(job, "w0") as ps:
        pair = Pair(ps, overlap=overlap)
        for number, line in enumerate(lines_of_step(pair)):

            def handle(number: int = number) -> None:
                if not ps._calls.is_within:
                    return  # the step has not begun, or is over
                try:
                    calls[number % len(calls)](pair)
                except PsError as error:
                    refusals.add(str(error).split(" was called while ")[0])

            pair.go_backward()
            before = pair.clock
            with AtLine(line, handle):
                pair.optimizer.step(weight=1)
            ps.wait()
            assert ps.clock == before + 1, text_of(line)
        pair.check()
        assert not ps.is_closed
    assert {"optimizer.state_dict()", "optimizer.step()", "ps.close()"} <= refusals


@pytest.mark.parametrize(
    ("taken_after", "own_share"), [(0, 0.0), (1, 0.0), (1, "trained")]
)
def test_an_error_at_any_line_of_a_local_step_leaves_its_round_to_be_pushed(
    job: Job, taken_after: int, own_share: float | Literal["trained"]
) -> None:
    """Such as Ctrl-C within a push, or while one is under way beside the script."""
    strategy = psworker.StreamingDiLoCo(
        2,
        fragment_count=2,
        taken_after=taken_after,
        own_share=own_share,
        lr=1.0,
        momentum=0.0,
    )
    keeps_all = taken_after == 0 or own_share == "trained"
    with connect(job, "w0") as ps:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        stepped = [each.detach().clone() for each in model.parameters()]

        def note_step(*_: object) -> None:
            for value, own in zip(stepped, model.parameters(), strict=True):
                assert own.grad is not None
                value -= 0.05 * own.grad

        optimizer.register_step_post_hook(note_step)
        ps.prepare(model, optimizer, strategy=strategy)
        engine = ps._engine
        assert engine is not None

        said = ""

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            if keeps_all:  # what is pushed once is what comes back
                ours = [each.detach() for each in model.parameters()]
                assert deviation(ours, stepped) < 1e-5, said
                torch._foreach_copy_(stepped, ours)

        step()
        with AtLine() as seen:
            for _ in range(3):
                step()
        lines = [each for each in seen.lines if "/strategies/" in each[0]]
        assert len(lines) > 100
        # What goes on beside a push is easily lost where it comes together with it.
        merging = [each for each in lines if "trained" in text_of(each)]
        for line in (*merging, *lines[::LOCAL_LINE_STRIDE]):
            said = text_of(line)
            for _ in range(4):
                at_line = AtLine(line)
                with suppress(Interrupted), at_line:
                    step()
                if at_line.is_reached:
                    break
            step()
            engine.end_round()
            assert engine._rounds.is_clean, said
            for part in engine._anchors.fragments:
                ours = [each.detach() for each in part.local]
                theirs = [each.detach() for each in part.anchor]
                assert deviation(ours, theirs) < 1e-5, said
