"""The elastic force moves a worker once for each push, whatever fails within it."""

from functools import partial

import pytest
import torch
from torch import nn

import psworker
from psworker.strategies.rounds import Progress
from psworker.strategies.strategy import Tensors
from tests.integration.interruptions import AtLine, Interrupted, Line, text_of

RATE = 0.125
FILES = ("outer_steps", "elastic", "anchors", "rounds", "inner_state")


class Watched(psworker.EASGD):
    """Keeps the tensors of the anchor.

    Attributes:
        anchor: The job's values.
    """

    anchor: Tensors

    def push(self, anchor: Tensors, local: Tensors, progress: Progress) -> Tensors:
        self.anchor = anchor
        return super().push(anchor, local, progress)


def _trained(
    watch_step: int, line: Line | None = None
) -> tuple[torch.Tensor, int, AtLine]:
    """Trains with a gradient of ones, and is interrupted in a step.

    Returns:
        The sum of a worker's and the job's value, which no exchange changes; the local
        steps that were taken; and what was watched.
    """
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    strategy = Watched(2, beta=0.25)
    watching = AtLine(line)
    with psworker.LocalConnection() as ps:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        optimizer.register_step_post_hook(note)
        ps.prepare(model, optimizer, strategy=strategy)
        for number in range(6):
            optimizer.zero_grad()
            model(torch.ones(1, 1).double()).sum().backward()
            if number != watch_step:
                optimizer.step()
                continue
            try:
                with watching:
                    optimizer.step()
            except Interrupted:
                assert line is not None
    (own,), (job,) = list(model.parameters()), strategy.anchor
    return (own + job).detach(), count, watching


@pytest.mark.parametrize("apart", [5, pytest.param(1, marks=pytest.mark.repeat)])
def test_a_worker_moves_once_whatever_line_of_a_push_raises(apart: int) -> None:
    total, count, seen = _trained(3)
    assert (total.item(), count) == (-6 * RATE, 6)
    lines = [line for line in seen.lines if _is_of_rounds(line)]
    assert len(lines) > 50
    wrong = []
    for line in lines[::apart]:
        total, count, watching = _trained(3, line)
        assert watching.is_reached, text_of(line)
        if total.item() != pytest.approx(-count * RATE, abs=1e-12):
            wrong.append(text_of(line))
    assert not wrong


def _is_of_rounds(line: Line) -> bool:
    return line[0].endswith(tuple(f"strategies/{name}.py" for name in FILES))


def test_a_worker_that_pushed_nothing_does_not_move() -> None:
    strategy = psworker.EASGD(1)
    local, anchor = [torch.ones(2)], [torch.zeros(2)]
    strategy.take(local, anchor)
    pushed = partial(strategy.push, anchor, local, Progress())
    assert torch.equal(pushed()[0], torch.full((2,), -0.9))
    assert torch.equal(local[0], torch.ones(2))
    pushed()  # again, since the first one was never sent
    for _ in range(2):
        strategy.take(local, anchor)
        assert torch.allclose(local[0], torch.full((2,), 0.1))
    pushed()
    local[0].fill_(5.0)  # it has joined anew
    strategy.take(local, anchor)
    assert torch.equal(local[0], torch.full((2,), 5.0))
