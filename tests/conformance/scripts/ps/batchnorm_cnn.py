"""Digits with a convolutional network and batch normalization.

A batch is normalized by its own statistics, so one large batch is not two small ones.
One process that does what two workers do accumulates the gradients of two batches.
"""

import sys

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
ACCUMULATE = int(sys.argv[2]) if len(sys.argv) > 2 else 1


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8)
    data = TensorDataset(images, torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for number, (images, labels) in enumerate(loader, start=1):
        loss = criterion(model(images), labels)
        (loss / ACCUMULATE).backward()
        print(loss.item(), len(images))
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    ps.close()


if __name__ == "__main__":
    main()
