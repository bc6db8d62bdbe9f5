"""A worker whose model has one very large tensor, beside a plain torch loop of blocks.

Run as `python large_model_worker.py COORDINATOR TENSOR_BYTES MODEL_BYTES STEPS`. Prints
`seeded`, then `step N SECONDS` for each, then `equal` when every element is what plain
torch makes of it.
"""

import sys
import time
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

import psworker

BLOCK: Final = 4 << 20
"""Elements that are filled and compared at once: the worker shall have no copy."""

OTHER_BYTES: Final = 64 << 20
"""Size of each of the other tensors."""


def runs(parameter: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    flat = parameter.detach().view(-1)
    for start in range(0, len(flat), BLOCK):
        yield start, flat[start : start + BLOCK]


def first_values(start: int, count: int) -> torch.Tensor:
    return (torch.arange(start, start + count) % 509).float()


def gradient(start: int, count: int, step: int) -> torch.Tensor:
    """Different everywhere and in each step, and exact in float32."""
    places = torch.arange(start, start + count)
    return ((places * (step + 1)) % 251 - 125).float() / 64


def build(tensor_bytes: int, model_bytes: int) -> nn.ParameterList:
    sizes = [tensor_bytes // 4]
    sizes += [OTHER_BYTES // 4] * ((model_bytes - tensor_bytes) // OTHER_BYTES)
    model = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)
    for parameter in model:
        for start, run in runs(parameter):
            run.copy_(first_values(start, len(run)))
        parameter.grad = torch.empty_like(parameter)
    return model


def fill_gradients(model: nn.ParameterList, step: int) -> None:
    for parameter in model:
        for start, run in runs(parameter.grad):
            run.copy_(gradient(start, len(run), step))


def expected(start: int, count: int, step_count: int) -> torch.Tensor:
    block = nn.Parameter(first_values(start, count))
    optimizer = torch.optim.SGD([block], lr=0.5)
    for step in range(step_count):
        block.grad = gradient(start, count, step)
        optimizer.step()
    return block.detach()


def main(address: str, tensor_bytes: int, model_bytes: int, step_count: int) -> None:
    model = build(tensor_bytes, model_bytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    limits = {"step_timeout_s": 120.0, "start_timeout_s": 120.0}
    with psworker.connect(address, "w0", **limits) as ps:
        model, optimizer = ps.prepare(model, optimizer)
        print("seeded", flush=True)
        for step in range(step_count):
            fill_gradients(model, step)
            began = time.perf_counter()
            optimizer.step()
            print(f"step {step} {time.perf_counter() - began:.2f}", flush=True)
    for parameter in model:
        for start, run in runs(parameter):
            assert torch.equal(run, expected(start, len(run), step_count)), start
    print("equal", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
