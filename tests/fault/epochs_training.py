"""A script whose every step depends on all before, with a line for each of them.

Arguments: epochs, seconds that a step takes, how often it steps its scheduler (`step`
or `epoch`; `registered` for a schedule, noise and counters of its own, which it has
registered), and the clocks at which it stands still until SIGUSR1 has it go on.
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


class Own:
    """A schedule, noise and counters that only this script knows.

    Attributes:
        rates: What the learning rate is multiplied by, from the start of each epoch on.
        seen: Samples of the steps so far, by epoch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.rates: tuple[float, ...] = (1.0,)
        self.seen: dict[int, int] = {}
        self.noise = torch.Generator().manual_seed(7)

    def draw(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.1 * torch.randn(inputs.shape, generator=self.noise)

    def step(self, epoch: int, count: int) -> None:
        self.seen[epoch] = self.seen.get(epoch, 0) + count
        self.set_rate()

    def end_epoch(self) -> None:
        self.rates += (self.rates[-1] * 0.7,)
        self.set_rate()

    def set_rate(self) -> None:
        rate = 0.01 * self.rates[-1] / (1 + sum(self.seen.values()))
        self.optimizer.param_groups[0]["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {
            "rates": self.rates,
            "seen": dict(self.seen),
            "noise": self.noise.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.seen = state["rates"], state["seen"]
        self.noise.set_state(state["noise"])
        self.set_rate()


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
        is_own = schedule == "registered"
        model, optimizer, loader = ps.prepare(
            model, optimizer, data(), *([] if is_own else [scheduler])
        )[:3]
        own = Own(optimizer)
        if is_own:
            ps.register_state("own", own)
        say("joined", clock=ps.clock, epoch=ps.epoch, generation=ps.generation)
        for epoch in range(ps.epoch if is_own else 0, epochs):
            if is_own:
                loader.set_epoch(epoch)
            for drawn, numbers in loader:
                inputs = own.draw(drawn) if is_own else drawn
                loss = (model(inputs).squeeze(1) - numbers / SAMPLE_COUNT).square()
                optimizer.zero_grad()
                loss.mean().backward()
                optimizer.step()
                if schedule == "step":
                    scheduler.step()
                if is_own:
                    own.step(ps.epoch, len(numbers))
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
                time.sleep(pace_s)  # as a larger model would take
                if ps.clock in holds:
                    say("holds", clock=ps.clock)
                    signal.sigwait({signal.SIGUSR1})
            if schedule == "epoch":
                scheduler.step()
            if is_own:
                own.end_epoch()
        say(
            "end",
            clock=ps.clock,
            model=digest(model.state_dict()),
            state=digest(optimizer.state_dict()["state"]),
            rate=optimizer.param_groups[0]["lr"],
            own=digest(own.state_dict()),
        )


if __name__ == "__main__":
    train()
