"""Digits with label smoothing and a one-cycle schedule of rate and momentum."""

import sys

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
EPOCHS = 2


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.95)
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    scheduler = OneCycleLR(optimizer, max_lr=0.3, total_steps=EPOCHS * len(loader))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(loss.item(), len(images))
    ps.close()


if __name__ == "__main__":
    main()
