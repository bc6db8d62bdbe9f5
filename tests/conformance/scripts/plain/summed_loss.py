"""Digits with a loss that is a sum over its batch and no mean."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 16
EPOCHS = 2


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = pixels[:920], labels[:920]
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            print(loss.item() / len(images), len(images))
            optimizer.step()


if __name__ == "__main__":
    main()
