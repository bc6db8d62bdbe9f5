"""Digits, with the smallest half of the weights pruned before each epoch."""

import sys

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 16
EPOCHS = 2


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = pixels[:1024], labels[:1024]
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for layer in (model[0], model[2]):
            limit = layer.weight.data.abs().median()
            layer.weight.data.mul_(layer.weight.data.abs() > limit)
        ps.publish(model)
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item(), len(images))


if __name__ == "__main__":
    main()
