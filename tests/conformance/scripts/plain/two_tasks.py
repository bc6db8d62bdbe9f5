"""Two heads on one body; few samples have a target for the second one.

A batch without any leaves the second head out, so that its gradients are `None`: on
one worker or on both.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
WITH_INK = 0.03


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.digit = nn.Linear(64, 10)
        self.ink = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float()
    has_ink = torch.rand(len(images)) < WITH_INK
    data = TensorDataset(images, torch.tensor(labels), images.mean(1), has_ink)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    for images, labels, ink, has_ink in loader:
        hidden = model.body(images)
        loss = nn.functional.cross_entropy(model.digit(hidden), labels)
        if has_ink.any():
            error = model.ink(hidden[has_ink]).squeeze(1) - ink[has_ink]
            loss = loss + 10 * error.square().sum() / len(images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), len(images))


if __name__ == "__main__":
    main()
