"""The training script of the fault tests: every push leaves a mark of its own.

With SGD at a rate of 1 a push's gradient is -1 in one slot, so that the slot counts
how often, and with which share of a clock, it was applied. Eight tensors of two types
in turn make eight chunks over two shards, each with the same slots: a push that is
only partly there shows as tensors that differ. Of a host group of n processes the mean
holds 1/n in each of their slots.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Final

import torch
from torch import nn

import psworker

TENSOR_COUNT: Final = 8
SLOTS_PER_WORKER: Final = 32
WORKERS_MAX: Final = 24
SLOT_COUNT: Final = SLOTS_PER_WORKER * WORKERS_MAX


def say(event: str, **values: object) -> None:
    line = json.dumps({"event": event, "at_s": time.monotonic(), **values}) + "\n"
    os.write(1, line.encode())


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    types = (torch.float32, torch.float64)
    model = nn.ParameterList(
        [
            nn.Parameter(torch.zeros(SLOT_COUNT, dtype=types[index % 2]))
            for index in range(TENSOR_COUNT)
        ]
    )
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def mark(model: nn.Module, slot: int) -> None:
    """Gives a model the gradient that leaves a mark in one slot."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[slot] = -1.0


def train() -> None:
    """Steps until told to stop.

    Arguments: position of the worker's slots, folder of the job, seconds a step takes.
    """
    torch.set_num_threads(1)
    position, folder, pace_s = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    model, optimizer = make_model()
    with psworker.connect(
        connect_timeout_s=60.0, step_timeout_s=60.0, start_timeout_s=90.0
    ) as ps:
        model, optimizer = ps.prepare(model, optimizer)
        say("joined", clock=ps.clock, worker_id=ps.worker_id)
        count = 0
        while not (folder / "stop").exists():
            slot = position * SLOTS_PER_WORKER + count % SLOTS_PER_WORKER
            count += 1
            mark(model, slot)
            say("begins", slot=slot)
            optimizer.step()
            result = ps.last_push
            assert result is not None
            say(
                "step",
                slot=slot,
                clock=result.clock,
                outcome=result.outcome,
                rejoined=result.rejoined,
                mode=result.mode,
                staleness=result.staleness,
                worker_id=ps.worker_id,
                digest=hash(tuple(p.sum().item() for p in model.parameters())),
            )
            time.sleep(pace_s)
    say("done", clock=ps.clock)


if __name__ == "__main__":
    train()
