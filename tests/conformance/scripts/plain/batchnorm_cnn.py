"""Digits with a convolutional network and batch normalization.

A batch is normalized by its own statistics, so one large batch is not two small ones.
One process that does what two workers do accumulates the gradients of two batches. The
running statistics are means over all batches so far, the same whoever had which batch:
the model is judged by them after every step.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
ACCUMULATE = int(sys.argv[2]) if len(sys.argv) > 2 else 1


@torch.no_grad()
def judge(model, images, labels):
    model.eval()
    loss = nn.functional.cross_entropy(model(images), labels)
    model.train()
    return loss


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    data = TensorDataset(images[197:], labels[197:])
    held_out = images[:197], labels[:197]
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, bias=False),
        nn.BatchNorm2d(16, momentum=None),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, bias=False),
        nn.BatchNorm2d(32, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number, (images, labels) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(images), labels)
        (loss / ACCUMULATE).backward()
        losses.append(loss.item())
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            judged = judge(model, *held_out).item()
            for each in losses:
                print(each, judged, BATCH_SIZE)
            losses.clear()


if __name__ == "__main__":
    main()
