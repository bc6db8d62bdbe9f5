"""As `training.py`, in rounds of local steps: each round's push leaves a mark.

The data is leased, and what became of each epoch is said at its end.
"""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import psworker
from psworker.strategies.strategy import Tensors
from tests.fault.training import SLOTS_PER_WORKER, make_model, say

STEPS_OF_ROUND: Final = 3
SAMPLE_COUNT: Final = 60


class Marks(psworker.LocalSteps):
    """Pushes a mark in the place of what local steps have changed."""

    def __init__(self, ps: psworker.Connection, position: int) -> None:
        super().__init__(STEPS_OF_ROUND)
        self._ps = ps
        self._first = position * SLOTS_PER_WORKER
        self._count = 0
        self._begun: tuple[int, int] | None = None  # slot and clock

    @override
    def push(
        self, anchor: Tensors, local: Tensors, progress: psworker.Progress
    ) -> Tensors:
        self.settle()
        slot = self._first + self._count % SLOTS_PER_WORKER
        self._count += 1
        self._begun = slot, progress.clock
        say("begins", slot=slot)
        marks = [torch.zeros_like(each) for each in anchor]
        for each in marks:
            each[slot] = -1.0
        return marks

    @override
    def weight(self, progress: psworker.Progress) -> float:
        return 1.0

    @override
    def take(self, local: Tensors, anchor: Tensors) -> None:
        super().take(local, anchor)
        self.settle()

    def settle(self) -> None:
        """Says what became of the newest push, once."""
        if self._begun is None:
            return
        (slot, clock), self._begun = self._begun, None
        result = self._ps.last_push
        assert result is not None
        say(
            "step",
            slot=slot,
            clock=result.clock,
            outcome=result.outcome,
            # What came between is of a later start.
            rejoined=result.rejoined or result.clock != clock,
            mode=result.mode,
            staleness=result.staleness,
            worker_id=self._ps.worker_id,
        )


def train() -> None:
    """Trains until told to stop; arguments as of `training.py`."""
    torch.set_num_threads(1)
    position, folder, pace_s = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    model, optimizer = make_model()
    loader = DataLoader(TensorDataset(torch.arange(SAMPLE_COUNT)), shuffle=True)
    ps = psworker.connect(
        connect_timeout_s=60.0, step_timeout_s=60.0, start_timeout_s=90.0
    )
    marks = Marks(ps, position)
    with ps:
        model, optimizer, loader = ps.prepare(model, optimizer, loader, strategy=marks)
        say("joined", clock=ps.clock, worker_id=ps.worker_id)
        while not (folder / "stop").exists():
            for _ in loader:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)  # of no account
                optimizer.step()
                marks.settle()
                time.sleep(pace_s)
                if (folder / "stop").exists():
                    break
            else:
                if loader.report is not None:
                    say("epoch", **asdict(loader.report))
        ps.close()
        marks.settle()
    say("done", clock=ps.clock)


if __name__ == "__main__":
    train()
