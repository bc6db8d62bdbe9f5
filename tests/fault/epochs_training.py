"""A script whose every step depends on all before, with a line for each of them.

Arguments: epochs, seconds that a step takes, how often it steps its scheduler (`step`
or `epoch`), and the clocks at which it stands still until SIGUSR1 has it go on.
"""

import hashlib
import json
import os
import signal
import sys
import time
from typing import Any, Final

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import psworker

SAMPLE_COUNT: Final = 48
BATCH_SIZE: Final = 4


def say(event: str, **values: object) -> None:
    os.write(1, (json.dumps({"event": event, **values}) + "\n").encode())


def digest(value: Any) -> str:  # noqa: ANN401, a state dict
    """One of all bytes, in the order of names."""
    found = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, dict):
            for name in sorted(value, key=str):
                found.update(str(name).encode())
                add(value[name])
        elif isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()


def data() -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLE_COUNT, 6, generator=drawn)
    numbers = torch.arange(SAMPLE_COUNT)
    return DataLoader(
        TensorDataset(inputs, numbers), batch_size=BATCH_SIZE, shuffle=True
    )


def train() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # of all threads
    torch.set_num_threads(1)
    torch.manual_seed(1)
    epochs, pace_s = int(sys.argv[1]), float(sys.argv[2])
    schedule, holds = sys.argv[3], [int(clock) for clock in sys.argv[4:]]
    model: nn.Module = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.98)
    with psworker.connect(
        connect_timeout_s=60.0, step_timeout_s=60.0, start_timeout_s=90.0
    ) as ps:
        model, optimizer, loader, scheduler = ps.prepare(
            model, optimizer, data(), scheduler
        )
        say("joined", clock=ps.clock, epoch=ps.epoch, generation=ps.generation)
        for _ in range(epochs):
            for inputs, numbers in loader:
                loss = (model(inputs).squeeze(1) - numbers / SAMPLE_COUNT).square()
                optimizer.zero_grad()
                loss.mean().backward()
                optimizer.step()
                if schedule == "step":
                    scheduler.step()
                result = ps.last_push
                assert result is not None
                say(
                    "step",
                    clock=result.clock,
                    epoch=ps.epoch,
                    outcome=result.outcome,
                    samples=numbers.tolist(),
                    rate=optimizer.param_groups[0]["lr"],
                )
                time.sleep(pace_s)
                if ps.clock in holds:
                    say("holds", clock=ps.clock)
                    signal.sigwait({signal.SIGUSR1})
            if schedule == "epoch":
                scheduler.step()
        say(
            "end",
            clock=ps.clock,
            model=digest(model.state_dict()),
            state=digest(optimizer.state_dict()["state"]),
            rate=optimizer.param_groups[0]["lr"],
        )


if __name__ == "__main__":
    train()
