"""A worker whose model has one very large tensor, beside a plain torch loop of blocks.

Run as `python large_model_worker.py COORDINATOR TENSOR_BYTES MODEL_BYTES STEPS`. Prints
`seeded`, then `step N SECONDS` for each, then `equal` when every element is what plain
torch makes of it.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any, Final

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


PATTERN: Final = (torch.arange(BLOCK) % 251 - 125).float() / 64


def fill_values(block: torch.Tensor, start: int) -> None:
    torch.mul(PATTERN[: len(block)], start // BLOCK % 509, out=block)


def fill_gradient(block: torch.Tensor, start: int, step: int) -> None:
    """Different in each block and step, and all sums of them exact in float32."""
    torch.mul(PATTERN[: len(block)], start // BLOCK % 7 + step + 1, out=block)


def build(tensor_bytes: int, model_bytes: int) -> nn.ParameterList:
    sizes = [tensor_bytes // 4]
    sizes += [OTHER_BYTES // 4] * ((model_bytes - tensor_bytes) // OTHER_BYTES)
    model = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)
    for parameter in model:
        for start, run in runs(parameter):
            fill_values(run, start)
        parameter.grad = torch.empty_like(parameter)
    return model


def fill_gradients(model: nn.ParameterList, step: int) -> None:
    for parameter in model:
        for start, run in runs(parameter.grad):
            fill_gradient(run, start, step)


def expected(start: int, count: int, step_count: int) -> torch.Tensor:
    block = nn.Parameter(torch.empty(count))
    fill_values(block.data, start)
    block.grad = torch.empty(count)
    optimizer = torch.optim.SGD([block], lr=0.5)
    for step in range(step_count):
        fill_gradient(block.grad, start, step)
        optimizer.step()
    return block.detach()


def main(address: str, tensor_bytes: int, model_bytes: int, step_count: int) -> None:
    model = build(tensor_bytes, model_bytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    limits: dict[str, Any] = {"step_timeout_s": 120.0, "start_timeout_s": 120.0}
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
