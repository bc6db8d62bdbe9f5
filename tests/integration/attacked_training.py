"""A worker's training on data that repeats, step by step as a test allows it.

Run with a worker's number and a file that says up to which step it may train, or "end".
"""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import psworker

END: Final = "end"
ELEMENT_COUNT: Final = 1024
PACE_S: Final = 0.01
STEP_TIMEOUT_S: Final = 40.0
"""A worker that is disturbed for longer than this ends."""

Objects = tuple[nn.Module, torch.optim.Optimizer]


def made() -> Objects:
    """A model of two tensors, each of which is a chunk, and its optimizer."""
    drawn = torch.Generator().manual_seed(1)
    model = nn.ParameterList(
        [torch.randn(ELEMENT_COUNT, generator=drawn) for _ in range(2)]
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)


def step(objects: Objects, worker_number: int, number: int) -> None:
    """One step of a worker, on a batch of its own."""
    model, optimizer = objects
    drawn = torch.Generator().manual_seed(1000 * number + worker_number)
    scale, shift = model.parameters()
    inputs = torch.randn(4, ELEMENT_COUNT, generator=drawn)
    optimizer.zero_grad()
    (inputs * scale + shift - inputs.sin()).square().mean().backward()
    optimizer.step()


def digest(objects: Objects) -> str:
    """SHA-256 of all values."""
    values = b"".join(p.detach().numpy().tobytes() for p in objects[0].parameters())
    return hashlib.sha256(values).hexdigest()


def joined(ps: Any) -> Objects:  # noqa: ANN401, a connection
    """The objects, as a member has them."""
    prepared: Objects = ps.prepare(*made())
    return prepared


def train() -> None:
    """Trains, and prints the number of each step and what the values are then."""
    torch.set_num_threads(1)
    worker_number, allowed = int(sys.argv[1]), Path(sys.argv[2])
    with psworker.connect(step_timeout_s=STEP_TIMEOUT_S, start_timeout_s=60) as ps:
        objects, number = joined(ps), 0
        while (wanted := allowed.read_text()) != END:
            time.sleep(PACE_S)
            if number == int(wanted):
                continue
            assert number < int(wanted), f"{number} steps, of {wanted} that are allowed"
            number += 1
            step(objects, worker_number, number)
            print(number, digest(objects), flush=True)


if __name__ == "__main__":
    train()
