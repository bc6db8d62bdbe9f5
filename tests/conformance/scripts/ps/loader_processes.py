"""Digits that two persistent processes of the loader turn and shift.

How an image is turned follows from its number, so it is the same whoever does it.
"""

import sys

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
EPOCHS = 2


class TurnedDigits(Dataset):
    def __init__(self, count):
        pixels, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels[:count] / 16).float().reshape(-1, 8, 8)
        self.labels = torch.tensor(labels[:count])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        turned = self.images[index].rot90(index % 3)
        return turned.roll(index % 2, dims=1).flatten(), self.labels[index]


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        TurnedDigits(900),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item(), len(images))
    ps.close()


if __name__ == "__main__":
    main()
