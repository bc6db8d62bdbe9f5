"""A job on a Ray of this machine, for `test_ray.py`.

Usage: `python -m tests.clusters.ray_job FOLDER`. Each start of a worker makes a file in
the folder with the pid of its raylet; what the workers return is printed.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray

from psworker.integrations.ray import launch

WORKERS, SHARDS, EPOCHS, BATCHES = 2, 2, 200, 20


def main(folder: Path) -> None:
    place = str(folder)

    def train() -> dict[str, Any]:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        import psworker

        torch.manual_seed(0)
        inputs = torch.randn(WORKERS * BATCHES * 8, 4)
        targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
        with psworker.connect() as ps:
            name = f"{ps.worker_id}-{os.getpid()}"
            Path(place, name).write_text(str(os.getppid()))
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
            model, optimizer, loader = ps.prepare(model, optimizer, loader)
            for epoch in range(ps.epoch, EPOCHS):
                loader.set_epoch(epoch)
                for batch, wanted in loader:
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(model(batch), wanted).backward()
                    optimizer.step()
                with Path(place, "epochs").open("a") as epochs:
                    epochs.write(f"{ps.worker_id} {epoch}\n")
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            return {"worker_id": ps.worker_id, "loss": loss.item()}

    ray.init(num_cpus=WORKERS + SHARDS, include_dashboard=False)
    results = launch(
        train,
        workers=WORKERS,
        shards=SHARDS,
        options=["--insecure", "--lease-ttl=2", "--checkpoint-every=50steps"],
        checkpoint_dir=str(folder / "checkpoints"),
    )
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
