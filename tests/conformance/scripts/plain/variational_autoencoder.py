"""A variational autoencoder of digits with weight-normalized layers.

The noise is a part of the data set, so that a sample has the same whoever trains on it.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
CODE_WIDTH = 4


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            weight_norm(nn.Linear(64, 48)), nn.ReLU(), nn.Linear(48, 2 * CODE_WIDTH)
        )
        self.decoder = nn.Sequential(
            weight_norm(nn.Linear(CODE_WIDTH, 48)), nn.ReLU(), nn.Linear(48, 64)
        )

    def forward(self, images, noise):
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        code = mean + noise * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def main():
    torch.manual_seed(0)
    pixels, _ = load_digits(return_X_y=True)
    noise = torch.randn(len(pixels), CODE_WIDTH)
    data = TensorDataset(torch.tensor(pixels / 16).float(), noise)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for images, noise in loader:
        drawn, mean, log_variance = model(images, noise)
        error = (drawn - images).square().sum(1)
        spread = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
        loss = (error + 0.1 * spread).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), len(images))


if __name__ == "__main__":
    main()
