"""One of several workers that know what one process has after each step.

Run as `python checked_worker.py COORDINATOR WORKER_ID RANK WORKER_COUNT FOLDER`. Ends
after step N, of every tenth, when FOLDER has a file `stop-N`. Prints `begins`, then a
line `STEP SECONDS` for every tenth step, and `equal STEPS` at the end.
"""

import sys
import time
from pathlib import Path
from typing import Final

import torch
from torch import nn

import psworker

ELEMENT_COUNTS: Final = (1 << 18, 1 << 16, 1000)
EACH: Final = 10


def gradient(like: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Different for each worker, step and element; sums of it are exact."""
    pattern = torch.arange(like.numel()).remainder(251).float() - 125
    return (pattern * ((step * 7 + rank * 3) % 11 - 5) / 64).view_as(like)


def build() -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    model = nn.ParameterList([torch.zeros(count) for count in ELEMENT_COUNTS])
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def main(address: str, worker_id: str, rank: int, count: int, folder: Path) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    step, is_over = 0, False
    with psworker.connect(address, worker_id, step_timeout_s=60.0) as ps:
        model, optimizer = ps.prepare(model, optimizer)
        print("begins", flush=True)
        while not is_over:
            for parameter in model.parameters():
                parameter.grad = gradient(parameter, rank, step)
            began_s = time.perf_counter()
            optimizer.step()
            took_s = time.perf_counter() - began_s
            for parameter in plain.parameters():
                each = [gradient(parameter, other, step) for other in range(count)]
                parameter.grad = torch.stack(each).mean(dim=0)
            plain_optimizer.step()
            for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(own, wanted), f"step {step}"
            step += 1
            if step % EACH == 0:
                print(f"{step} {took_s:.6f}", flush=True)
                is_over = (folder / f"stop-{step}").exists()
    print(f"equal {step}", flush=True)


if __name__ == "__main__":
    main(
        sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
    )
