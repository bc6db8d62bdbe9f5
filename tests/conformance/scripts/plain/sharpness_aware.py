"""Digits, with sharpness-aware steps: the gradient is that of a worse neighbour."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 16
EPOCHS = 2
RADIUS = 0.05


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = pixels[:1024], labels[:1024]
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    criterion = nn.CrossEntropyLoss()
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.get_total_norm([each.grad for each in model.parameters()])
            with torch.no_grad():
                moves = [each.grad * (RADIUS / norm) for each in model.parameters()]
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(move)
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.sub_(move)
            optimizer.step()
            print(loss.item(), len(images))


if __name__ == "__main__":
    main()
