"""Digits whose moments are thrown away half-way, as at a warm restart."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
RESTART = 25
HEAD_RESTART = 40


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, eps=1e-4)
    for step, (images, labels) in enumerate(loader):
        if step == RESTART:
            optimizer.state.clear()
        if step == HEAD_RESTART:
            for parameter in model[2].parameters():
                optimizer.state[parameter]["exp_avg"].zero_()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), len(images))


if __name__ == "__main__":
    main()
