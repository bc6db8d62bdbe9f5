"""Digits in the order that the script's own seeds give, with other draws between."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 16
EPOCHS = 3


def main():
    torch.manual_seed(7)
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = pixels[:400], labels[:400]
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    own = torch.Generator().manual_seed(8)
    drawn = RandomSampler(data, replacement=True, num_samples=100, generator=own)
    second = DataLoader(data, batch_size=BATCH_SIZE, sampler=drawn)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for each in (loader, second):
            mask = torch.rand(64) < 0.9
            for images, labels in each:
                loss = criterion(model(images * mask), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item(), len(images))


if __name__ == "__main__":
    main()
