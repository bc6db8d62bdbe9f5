"""Digits, where batches are skipped: too dark, outliers, or with a failed backward.

A step is for several batches, with the mean over the samples that were not skipped. One
process that does what two workers do accumulates the gradients of their batches.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 16
ACCUMULATE = 4 * (int(sys.argv[2]) if len(sys.argv) > 2 else 1)
EPOCHS = 2


def damage(pixels):
    """Damages batches; the first one of a step so that its backward pass fails."""
    for batch, factor in ((3, 0), (6, 1e4), (8, 50), (9, 0), (21, 1e4), (31, 1e4)):
        pixels[batch * BATCH_SIZE : (batch + 1) * BATCH_SIZE] *= factor
    return pixels


def refuse_large(gradient):
    if gradient.abs().max() > 5:
        raise RuntimeError("the gradient is too large")


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = damage(pixels[: 32 * BATCH_SIZE]), labels[: 32 * BATCH_SIZE]
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model[0].weight.register_hook(refuse_large)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        kept = 0
        for number, (images, labels) in enumerate(loader, start=1):
            if not images.any():
                print(0.0, len(images))
                continue
            loss = criterion(model(images), labels)
            print(loss.item(), len(images))
            try:
                if loss < 1000:
                    loss.backward()
                    kept += 1
            except RuntimeError:
                optimizer.zero_grad()
                continue
            if number % ACCUMULATE == 0:
                for parameter in model.parameters():
                    parameter.grad /= kept
                optimizer.step()
                optimizer.zero_grad()
                kept = 0


if __name__ == "__main__":
    main()
