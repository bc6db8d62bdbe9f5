"""Digits under autocast to bfloat16.

A matrix product in bfloat16 rounds otherwise for another number of rows, so one
process that does what two workers do accumulates the gradients of two batches.
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
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for number, (images, labels) in enumerate(loader, start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        (loss / ACCUMULATE).backward()
        print(loss.item(), len(images))
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    ps.close()


if __name__ == "__main__":
    main()
