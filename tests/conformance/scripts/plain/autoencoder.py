"""An autoencoder of digits, RMSprop with an exponential schedule."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32


def main():
    torch.manual_seed(0)
    pixels, _ = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float())
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(
        nn.Linear(64, 32),
        nn.Tanh(),
        nn.Linear(32, 6),
        nn.Linear(6, 32),
        nn.Tanh(),
        nn.Linear(32, 64),
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.5)
    scheduler = ExponentialLR(optimizer, gamma=0.98)
    for (images,) in loader:
        loss = nn.functional.mse_loss(model(images), images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(loss.item(), len(images))


if __name__ == "__main__":
    main()
