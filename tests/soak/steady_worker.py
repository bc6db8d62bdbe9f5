"""A worker that makes many small steps, on data that is leased in epochs of 1,000.

Run as `python steady_worker.py COORDINATOR STEPS EACH`. Prints a line after EACH steps,
and `over` at the end.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker


def main(address: str, step_count: int, each: int) -> None:
    model = nn.Linear(20, 10)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(torch.randn(2000, 20)), 2, shuffle=True)
    done = 0
    with psworker.connect(address, "w0") as ps:
        model, optimizer, loader = ps.prepare(model, optimizer, loader)
        while done < step_count:
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                done += 1
                if done % each == 0:
                    print(done, flush=True)
    print("over", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
