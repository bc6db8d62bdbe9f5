"""Training with a strategy of local steps, on data that the workers share.

Arguments as in `training.py`; the variable `STRATEGY` has its name, `EVERY` the local
steps of a round, `DIES_AFTER` those of its own after which the worker is killed.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

import psworker
from psworker.strategies.known import strategy_named
from tests.fault.epochs_training import SAMPLE_COUNT, data
from tests.fault.training import say

if TYPE_CHECKING:
    from collections.abc import Callable

FURTHER: Final[dict[str, dict[str, Any]]] = {
    "fedprox": {"mu": 0.1, "fraction": 0.5},
    "streaming-diloco": {"fragment_count": 2, "taken_after": 1},
    "decoupled-diloco": {"fragment_count": 2, "taken_after": 1},
}
"""What some strategies are made with beside the steps of a round."""


def train() -> None:
    """Trains whole epochs until told to stop."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    folder, pace_s = Path(sys.argv[2]), float(sys.argv[3])
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    name = os.environ["STRATEGY"]
    make: Callable[..., psworker.Strategy] = strategy_named(name)
    strategy = make(int(os.environ["EVERY"]), **FURTHER.get(name, {}))
    with psworker.connect(
        connect_timeout_s=60.0, step_timeout_s=60.0, start_timeout_s=90.0
    ) as ps:
        model, optimizer, loader = ps.prepare(
            model, optimizer, data(), strategy=strategy
        )
        say("joined", clock=ps.clock, worker_id=ps.worker_id)
        step_count = 0
        while not (folder / "stop").exists():
            for inputs, numbers in loader:
                loss = (model(inputs).squeeze(1) - numbers / SAMPLE_COUNT).square()
                optimizer.zero_grad()
                loss.mean().backward()
                optimizer.step()
                say("step", clock=ps.clock)
                step_count += 1
                if step_count == int(os.environ.get("DIES_AFTER", "0")):
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(pace_s)
            if (report := loader.report) is not None:
                counts = {
                    name: getattr(report, name)
                    for name in (
                        *("epoch", "seen_once", "seen_again", "torn", "dropped"),
                        *("skipped", "never"),
                    )
                }
                say("epoch", **counts)
    say("done", clock=ps.clock)


if __name__ == "__main__":
    train()
