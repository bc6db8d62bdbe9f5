"""A script for `psworker run --one-push-per-host`; the second process dies once."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker

SAMPLE_COUNT = 64


def main() -> None:
    torch.manual_seed(0)
    is_victim = os.environ["PS_LOCAL_RANK"] == "1"
    mark = Path(sys.argv[1])
    back = mark.with_name("back")
    rows = torch.arange(SAMPLE_COUNT)
    loader = DataLoader(TensorDataset(rows), batch_size=2)
    model = nn.Embedding(SAMPLE_COUNT, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with psworker.connect() as ps:
        model, optimizer, loader = ps.prepare(model, optimizer, loader)
        if mark.exists():
            back.touch()
        for epoch in range(2):
            for step, (batch,) in enumerate(loader):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if is_victim and step == 2 and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                while not is_victim and step == 4 and not back.exists():
                    time.sleep(0.05)
            if loader.report is not None:
                print(f"epoch {epoch}: {loader.report.seen_once} seen once", flush=True)
        print(f"end as {ps.worker_id} of {ps.worker_count}", flush=True)


if __name__ == "__main__":
    main()
