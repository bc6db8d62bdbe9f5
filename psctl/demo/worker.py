"""A worker of the demo: an ordinary training script with the four lines in it.

Prints one JSON line a step, which the demo reads through a pipe.
"""

import json
import sys

from torch import nn

import psworker
from psctl.demo.tasks import load_task


def main(task_name: str, epoch_count: int, updates_per_clock: int) -> None:
    task = load_task(task_name)
    model = task.new_model()
    optimizer = task.new_optimizer(model, updates_per_clock)
    loader = task.new_loader()
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epoch_count):
        if updates_per_clock > 1:
            task.set_asynchronous_rate(
                optimizer, updates_per_clock, epoch / epoch_count
            )
        for images, labels, indices in loader:
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert ps.last_push is not None, "step() has pushed"
            step = {
                "worker_id": ps.worker_id,
                "clock": ps.clock,
                "frontier": ps.last_push.frontier,
                "epoch": epoch,
                "loss": loss.item(),
                "traffic_bytes": ps.bytes_sent + ps.bytes_received,
                "indices": indices.tolist(),
            }
            print(json.dumps(step), flush=True)
    ps.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
