"""Digits with gradient accumulation: one step for four batches."""

import sys

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 16
ACCUMULATE = 4
EPOCHS = 2


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = pixels[:1536], labels[:1536]
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
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
