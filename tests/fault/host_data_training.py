"""A process of a host group that trains on leased data, for the fault tests.

Arguments: position, folder, seconds that a step takes.
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from tests.fault.training import say

SAMPLE_COUNT = 90
BATCH_SIZE = 3
EPOCH_COUNT = 2


def main() -> None:
    torch.set_num_threads(1)
    pace_s = float(sys.argv[3])
    rows = torch.arange(SAMPLE_COUNT)
    model = nn.Embedding(SAMPLE_COUNT, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH_SIZE, shuffle=True)
    with psworker.connect(
        connect_timeout_s=60.0, step_timeout_s=60.0, start_timeout_s=90.0
    ) as ps:
        model, optimizer, loader = ps.prepare(model, optimizer, loader)
        say("joined", worker_id=ps.worker_id)
        for epoch in range(EPOCH_COUNT):
            for (batch,) in loader:
                say("begins", slot=0)
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                assert ps.last_push is not None
                say(
                    "step",
                    epoch=epoch,
                    rows=batch.tolist(),
                    outcome=ps.last_push.outcome,
                )
                time.sleep(pace_s)
            report = loader.report
            if report is not None:
                say("epoch", epoch=epoch, once=report.seen_once, text=f"{report}")


if __name__ == "__main__":
    main()
