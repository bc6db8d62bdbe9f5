"""Goes on from a checkpoint, watches the optimizer's state, and takes it back once.

The checkpoint is of a short run of one process, made here. Later the state of one step
is kept, and loaded again some steps after.
"""

import io
import sys

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
KEPT_STEP, LOADED_STEP = 20, 35


def build():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=4e-3, amsgrad=True)


def earlier_run(data):
    model, optimizer = build()
    for images, labels in DataLoader(data, batch_size=300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    checkpoint = torch.load(io.BytesIO(earlier_run(data)))
    model, optimizer = build()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for step, (images, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        momentum = sum(each["exp_avg"].norm() for each in state["state"].values())
        print(loss.item(), momentum.item(), len(images))
        if step == KEPT_STEP:
            file = io.BytesIO()
            torch.save(state, file)
        if step == LOADED_STEP:
            file.seek(0)
            optimizer.load_state_dict(torch.load(file))
    ps.close()


if __name__ == "__main__":
    main()
