"""Digits on the training part of a stratified fold, validated after every epoch.

The loader of the held-out part is not shared out: every worker validates on all of it.
"""

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 64
EPOCHS = 3


@torch.no_grad()
def validate(model, loader):
    correct = [(model(images).argmax(1) == labels).sum() for images, labels in loader]
    return float(sum(correct) / len(loader.dataset))


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(pixels, labels)
    train, held_out = (Subset(data, part) for part in next(folds))
    loader = DataLoader(train, batch_size=BATCH_SIZE, shuffle=True)
    validation = DataLoader(held_out, batch_size=200)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    accuracy = validate(model, validation)
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item(), accuracy, len(images))
        accuracy = validate(model, validation)


if __name__ == "__main__":
    main()
