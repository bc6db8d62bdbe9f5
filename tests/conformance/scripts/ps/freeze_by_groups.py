"""Digits with a layer that is taken out of its group for a while, and keeps still."""

import sys

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
FREEZE = 20
THAW = 40


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for step, (images, labels) in enumerate(loader):
        if step == FREEZE:
            optimizer.param_groups[0]["params"] = list(model[2].parameters())
        if step == THAW:
            optimizer.param_groups[0]["params"] = list(model.parameters())
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        model.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), len(images))
    ps.close()


if __name__ == "__main__":
    main()
