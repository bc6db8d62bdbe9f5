"""Decoupled DiLoCo in a job, against its algorithm for all workers in one process.

Which learners a merge consists of is a matter of chance here. Each learner notes its
steps, pushes and takes. The algorithm is then done again from these alone, and each
value that a learner took, and each of its own after each step, must come out.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import psworker
from pswire.membership import Mode
from psworker.strategies.decoupled import DecoupledDiLoCo
from psworker.strategies.rounds import Progress
from psworker.strategies.strategy import Tensors
from tests.doubles.promised_numbers import FLOAT64_DEVIATION_MAX
from tests.integration.job import (
    WAIT_TIMEOUT_S,
    Job,
    connect,
    deviation,
    run_workers,
    worker_behind,
)

OWN_SHARE: Final = 0.5
LR: Final = 0.7
FRAGMENTS: Final = ((0, 1), (2, 3))
SHAPES: Final = ((4, 3), (2, 4))
"""Of the first parameter of each fragment."""
ANSWERS: Final = ("take", "follow")

Values = list[torch.Tensor]


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(20261128)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def _inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _copies(tensors: Any) -> Values:  # noqa: ANN401, any iterable
    return [each.detach().clone() for each in tensors]


OTHERS: Final = ((2, 2, 1), (3, 4, 2))
"""Further quorums, steps of a round, and steps until what comes back is taken."""


@dataclass
class Event:
    """What a learner has done.

    Attributes:
        kind: It began with values; took a local step; pushed; took an answer; was
            late, and followed the job's newest values; or was done with a step.
        values: Those of the job: of a fragment that it has taken, or all; gradients of
            a step; its own when it was done with one.
        tokens: Of a step.
        clock: That it pushed for.
        fragment: That it pushed, or took.
        weight: Of the push.
    """

    kind: Literal["begin", "step", "push", "take", "follow", "done"]
    values: Values = field(default_factory=list)
    tokens: int = 0
    clock: int = 0
    fragment: int = 0
    weight: float = 0.0


class Noted(DecoupledDiLoCo):
    """Notes what it is asked for."""

    def __init__(self, events: list[Event], every: int, taken_after: int) -> None:
        super().__init__(
            every,
            fragment_count=len(FRAGMENTS),
            taken_after=taken_after,
            own_share=OWN_SHARE,
            lr=LR,
        )
        self.events = events

    @override
    def weight(self, progress: Progress) -> float:
        weight = super().weight(progress)
        push = Event("push", clock=progress.clock, fragment=progress.fragment)
        push.weight = weight
        self.events.append(push)
        return weight

    @override
    def take(self, local: Tensors, anchor: Tensors) -> None:
        super().take(local, anchor)
        place = SHAPES.index(tuple(anchor[0].shape))
        self.events.append(Event("take", _copies(anchor), fragment=place))


class Learner:
    """Does again what a learner has noted, and says what it has pushed."""

    def __init__(self, events: Sequence[Event], history: list[Values]) -> None:
        self.events = list(events)
        self.pushed: Values = []
        self.newest: list[Values] = []  # of the job, that it began with or followed
        self._history = history  # the job's values after each clock
        self._model = _model()
        self._optimizer = _inner(self._model)
        self._local = list(self._model.parameters())
        self._base: list[Values] = []
        # By fragment: tokens and steps since the last push that counted.
        self._work = [(0, 0) for _ in FRAGMENTS]
        self._sent: tuple[Event, tuple[int, int]] | None = None

    def do(self) -> Event:
        """Does the next event, and checks what was noted of it."""
        event = self.events.pop(0)
        with torch.no_grad():
            getattr(self, f"_{event.kind}")(event)
        return event

    def _begin(self, event: Event) -> None:
        self.newest.append(event.values)
        self._base = [[event.values[i] for i in part] for part in FRAGMENTS]
        self._work = [(0, 0) for _ in FRAGMENTS]
        self._sent = None
        for own, value in zip(self._local, event.values, strict=True):
            own.copy_(value)

    def _step(self, event: Event) -> None:
        for own, gradient in zip(self._local, event.values, strict=True):
            own.grad = gradient
        self._optimizer.step()
        self._work = [(t + event.tokens, n + 1) for t, n in self._work]

    def _push(self, event: Event) -> None:
        tokens, steps = self._work[event.fragment]
        assert event.weight == pytest.approx(tokens * tokens / max(1, steps))
        own, base = self._own(event.fragment), self._base[event.fragment]
        self.pushed = [b - mine for b, mine in zip(base, own, strict=True)]
        self._sent = event, (tokens, steps)

    def _take(self, event: Event) -> None:
        place = event.fragment
        if self._sent is not None:
            push, (tokens, steps) = self._sent
            assert push.fragment == place
            newest = [self._history[push.clock][i] for i in FRAGMENTS[place]]
            assert deviation(event.values, newest) < FLOAT64_DEVIATION_MAX
            self._work[place] = (
                self._work[place][0] - tokens,
                self._work[place][1] - steps,
            )
            self._sent = None
        for mine, value in zip(self._own(place), event.values, strict=True):
            mine.copy_(OWN_SHARE * mine + (1 - OWN_SHARE) * value)
        self._base[place] = event.values

    def _follow(self, event: Event) -> None:
        self.newest.append(event.values)
        self._sent = None
        for place, part in enumerate(FRAGMENTS):
            newest = [event.values[i] for i in part]
            base = self._base[place]
            for mine, b, new in zip(self._own(place), base, newest, strict=True):
                mine.add_(new - b)
            self._base[place] = newest

    def _done(self, event: Event) -> None:
        assert deviation(self._local, event.values) < FLOAT64_DEVIATION_MAX

    def _own(self, fragment: int) -> list[nn.Parameter]:
        return [self._local[i] for i in FRAGMENTS[fragment]]


def check(logs: dict[str, list[Event]]) -> list[int]:
    """Does the algorithm again; how many learners each merge had."""
    shared = [nn.Parameter(each) for each in _copies(_model().parameters())]
    outer = [
        torch.optim.SGD([shared[i] for i in part], lr=LR, momentum=0.9, nesterov=True)
        for part in FRAGMENTS
    ]
    history = [_copies(shared)]
    learners = [Learner(logs[name], history) for name in sorted(logs)]
    merges = []
    for clock in range(1, max(e.clock for log in logs.values() for e in log) + 1):
        parts = []
        for learner in learners:
            while learner.events and learner.events[0].clock < clock:
                learner.do()
            if learner.events and learner.events[0].clock == clock:
                push = learner.do()
                answer = next((e for e in learner.events if e.kind in ANSWERS), None)
                if push.weight and answer is not None and answer.kind == "take":
                    parts.append((push, learner.pushed))
        if parts:
            (place,) = {push.fragment for push, _ in parts}
            total = sum(push.weight for push, _ in parts)
            for position, i in enumerate(FRAGMENTS[place]):
                shares = [push.weight / total * own[position] for push, own in parts]
                shared[i].grad = torch.stack(shares).sum(0)
            outer[place].step()
        history.append(_copies(shared))
        merges.append(len(parts))
    for learner in learners:
        while learner.events:
            learner.do()
        for values in learner.newest:
            nearest = min(deviation(values, each) for each in history)
            assert nearest < FLOAT64_DEVIATION_MAX
    return merges


def _loader(batch_count: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * batch_count, 3, generator=generator).double()
    targets = torch.randn(2 * batch_count, 2, generator=generator).double()
    return DataLoader(TensorDataset(inputs, targets), batch_size=2)


def _note_values(ps: psworker.connection.Connection, events: list[Event]) -> None:
    """Notes when a learner begins with the job's values, and when it follows them."""
    assert ps._engine is not None
    anchors = ps._engine._anchors

    def noting(kind: Literal["begin", "follow"], call: Callable[[], None]) -> Any:  # noqa: ANN401
        def noted() -> None:
            values: Values = [torch.empty(0)] * 4
            for part, fragment in zip(FRAGMENTS, anchors.fragments, strict=True):
                for i, value in zip(part, _copies(fragment.anchor), strict=True):
                    values[i] = value
            events.append(Event(kind, values))
            call()

        return noted

    vars(anchors).update(
        start_over=noting("begin", anchors.start_over),
        follow_job=noting("follow", anchors.follow_job),
    )


class DiedError(Exception):
    """A learner ends in the middle of a round, and does not leave."""


def _await_answer(ps: psworker.connection.Connection) -> None:
    """A push that is under way is answered: the next step takes what it brings."""
    assert ps._engine is not None
    answer = ps._engine._outer_steps._sender._answer
    assert answer is None or answer.wait(WAIT_TIMEOUT_S)


def _is_between_pushes(ps: psworker.connection.Connection, step_count: int) -> bool:
    """Whether so many steps have come, and no push is under way."""
    assert ps._engine is not None
    if step_count < 0:
        return False
    _await_answer(ps)
    rounds = ps._engine._rounds
    return rounds.sent is None and rounds.steps_since_push > 0


def _learner(
    job: Job,
    logs: dict[str, list[Event]],
    batch_count: int,
    *,
    every: int,
    taken_after: int,
    pace: Callable[[str, psworker.connection.Connection], None] = lambda *_: None,
    dies_after: int = 0,
    reports: list[Any] | None = None,
) -> Callable[[str], list[int]]:
    """A learner's work; the sizes of its batches."""

    def work(worker_id: str) -> list[int]:
        events = logs.setdefault(worker_id, [])
        model = _model()
        optimizer = _inner(model)
        seen = []
        strategy = Noted(events, every, taken_after)
        with connect(job, worker_id) as ps:
            *_, loader = ps.prepare(
                model, optimizer, _loader(batch_count), strategy=strategy
            )
            _note_values(ps, events)
            events.append(Event("begin", _copies(model.parameters())))
            token_count = 0

            def before_step(*_: object) -> None:
                gradients = [each.grad for each in model.parameters()]
                events.append(Event("step", _copies(gradients), token_count))

            optimizer.register_step_pre_hook(before_step)
            for inputs, targets in loader:
                pace(worker_id, ps)
                seen.append(len(inputs))
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                token_count = 3 + len(seen) % 4
                ps.note_tokens(token_count)
                optimizer.step()
                events.append(Event("done", _copies(model.parameters())))
                if dies_after and _is_between_pushes(ps, len(seen) - dies_after):
                    raise DiedError
            if reports is not None:
                reports.append(loader.report)
        return seen

    return work


@pytest.mark.parametrize(
    ("quorum", "every", "taken_after"),
    [
        *((1, 4, 1), (2, 6, 2)),
        *(pytest.param(*case, marks=pytest.mark.repeat) for case in OTHERS),
    ],
)
def test_it_is_the_algorithm_whoever_comes_to_a_merge(
    tmp_path: Path, quorum: int, every: int, taken_after: int
) -> None:
    logs: dict[str, list[Event]] = {}
    names = ("w0", "w1", "w2")
    with Job(tmp_path, workers_min=3, mode=Mode.QUORUM, quorum=quorum) as job:
        work = _learner(job, logs, 90, every=every, taken_after=taken_after)
        seen = run_workers(dict.fromkeys(names, work))
    assert sum(map(len, seen.values())) == 90
    merges = check(logs)
    print("learners of each merge:", merges)
    assert max(merges) >= quorum


def test_a_slow_learner_misses_clocks_and_loses_nothing(tmp_path: Path) -> None:
    """It has a step for each six of the others, of which one joins later.

    They have their answers before the next step, so that 60 steps of one of them are 15
    clocks at least, and four of the slow one are two of theirs.
    """
    logs: dict[str, list[Event]] = {}
    counts = dict.fromkeys(("w0", "w1", "w2"), 0)
    moved = threading.Condition()

    def pace(worker_id: str, ps: psworker.connection.Connection) -> None:
        if worker_id != "w2":
            _await_answer(ps)
        with moved:
            counts[worker_id] += 1
            moved.notify_all()
            if worker_id == "w2":  # near the end the others wait for its data
                assert moved.wait_for(
                    lambda: counts["w0"] + counts["w1"] >= min(6 * counts["w2"], 120),
                    WAIT_TIMEOUT_S,
                )

    def late(worker_id: str) -> list[int]:
        with moved:
            assert moved.wait_for(lambda: counts["w0"] >= 12, WAIT_TIMEOUT_S)
        return learn(worker_id)

    with Job(tmp_path, workers_min=2, mode=Mode.QUORUM, quorum=1) as job:
        learn = _learner(job, logs, 160, every=4, taken_after=1, pace=pace)
        seen = run_workers({"w0": learn, "w1": late, "w2": learn})
    assert sum(map(len, seen.values())) == 160
    assert len(check(logs)) > 10
    assert "follow" in [event.kind for event in logs["w2"]]


def test_local_steps_go_on_where_no_quorum_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The push that waits for one in vain is made again, beside further steps.

    One who waits within a step has two while a push waits, and a third that waits.
    """
    goes_on = threading.Event()
    shown: dict[str, set[int]] = {"w0": set(), "w1": set()}

    def train(worker_id: str) -> None:
        model = _model()
        optimizer = _inner(model)
        strategy = Noted([], 2, 1)
        timeout_s = 1.0 if worker_id == "w0" else WAIT_TIMEOUT_S
        with connect(job, worker_id, step_timeout_s=timeout_s) as ps:
            ps.prepare(model, optimizer, strategy=strategy)
            stepper = worker_behind(ps)._stepper
            assert stepper is not None
            if worker_id == "w1":  # it trains, but is not there yet
                assert goes_on.wait(WAIT_TIMEOUT_S)
            step_count = push_count = 0
            deadline_s = time.monotonic() + WAIT_TIMEOUT_S
            while ps.clock < 2:
                assert time.monotonic() < deadline_s, "no steps beside a push"
                optimizer.zero_grad()
                model(torch.ones(1, 3).double()).square().sum().backward()
                optimizer.step()
                step_count += 1
                shown[worker_id].add(worker_behind(ps).work.fragment_under_way)
                vain_count = caplog.text.count("the local steps go on meanwhile")
                if vain_count > push_count:
                    # By chance a push may be waited for while no step is made.
                    if worker_id == "w0" and step_count > 3:
                        stepper._timeout_s = WAIT_TIMEOUT_S
                        goes_on.set()
                    step_count, push_count = 0, vain_count

    with Job(tmp_path, workers_min=2, mode=Mode.QUORUM, quorum=2) as job:
        run_workers(dict.fromkeys(("w0", "w1"), train))
    assert goes_on.is_set()
    assert shown["w0"] & {1, 2}


def test_what_a_step_waits_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is what the fault tests look for."""
    monkeypatch.setenv("PS_HISTORY", f"{tmp_path}/history/")
    shown = []
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = _model()
        optimizer = _inner(model)
        strategy = psworker.StreamingDiLoCo(4, fragment_count=2, taken_after=0)
        *_, loader = ps.prepare(model, optimizer, _loader(8), strategy=strategy)
        for inputs, _ in loader:
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
            shown.append(worker_behind(ps).work.steps_since_push)
    (history,) = (tmp_path / "history").glob("worker-*.jsonl")
    lines = [json.loads(text) for text in history.read_text().splitlines()]
    clocks = [line["clock"] for line in lines if line["type"] == "wait"]
    assert clocks == [1, 2, 3, 4]
    assert shown == 4 * [1, 0]


@pytest.mark.repeat  # tests/fault/test_decoupled.py kills processes
def test_what_a_dead_learner_had_not_pushed_is_trained_by_the_others(
    tmp_path: Path,
) -> None:
    logs: dict[str, list[Event]] = {}
    reports: list[Any] = []
    died = threading.Event()
    options: dict[str, Any] = {"every": 6, "taken_after": 1, "reports": reports}

    def living(worker_id: str) -> list[int]:
        def pace(*_: object) -> None:
            if len(logs[worker_id]) >= 20:
                assert died.wait(WAIT_TIMEOUT_S)

        return _learner(job, logs, 90, pace=pace, **options)(worker_id)

    def dying(worker_id: str) -> list[int]:
        with pytest.raises(DiedError):
            _learner(job, logs, 90, dies_after=9, **options)(worker_id)
        died.set()
        return []

    quorum: dict[str, Any] = {"mode": Mode.QUORUM, "quorum": 1, "lease_ttl_ms": 5_000}
    with Job(tmp_path, workers_min=2, **quorum) as job:
        seen = run_workers({"w0": living, "w1": living, "w2": dying})
    trained = len(seen["w0"]) + len(seen["w1"])
    by_dead = sum(event.kind == "done" for event in logs["w2"])
    assert trained > 90 - by_dead  # some of what it had trained was trained again
    check(logs)
    assert reports[-1].seen_once == 2 * 90
