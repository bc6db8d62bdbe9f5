"""Times a step of a 25 M-parameter CUDA model against CPU shards, printed as JSON.

Both kinds of worker in turn in one run: tensors on CUDA, and the same on the CPU.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tests.integration.job import Job, connect

ELEMENT_COUNT = 25_000_000
REPETITION_COUNT = 15


def main() -> None:
    took_s: dict[str, list[float]] = {"cuda": [], "cpu": []}
    with tempfile.TemporaryDirectory() as folder:
        for device in took_s:
            with Job(Path(folder) / device, shard_count=2, sockets=True) as job:
                model = torch.nn.Module()
                values = torch.zeros(ELEMENT_COUNT, device=device)
                model.values = torch.nn.Parameter(values)
                with connect(job, "w0") as ps:
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                    model, optimizer = ps.prepare(model, optimizer)
                    model.values.grad = torch.ones_like(model.values)
                    for _ in range(REPETITION_COUNT):
                        if device == "cuda":
                            torch.cuda.synchronize()
                        started = time.perf_counter()
                        optimizer.step()
                        if device == "cuda":
                            torch.cuda.synchronize()
                        took_s[device].append(time.perf_counter() - started)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "element_count": ELEMENT_COUNT,
        "median_s": {name: statistics.median(t) for name, t in took_s.items()},
        "spread_s": {name: [min(t), max(t)] for name, t in took_s.items()},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
