"""A generative adversarial network that draws digits: two models, two optimizers.

The noise is a part of the data set, so that a sample has the same whoever trains on it.
"""

import sys

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
EPOCHS = 2


def real(logits):
    return nn.functional.binary_cross_entropy_with_logits(
        logits, torch.full_like(logits, 0.9)
    )


def fake(logits):
    return nn.functional.binary_cross_entropy_with_logits(
        logits, torch.zeros_like(logits)
    )


def main():
    torch.manual_seed(0)
    pixels = load_digits().data[:900]
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.randn(len(pixels), 8))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    g = nn.Sequential(
        nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.Sigmoid()
    )
    d = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    g_opt = torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.999))
    ps = psworker.connect()
    g, d, g_opt, d_opt, loader = ps.prepare(g, d, g_opt, d_opt, loader)
    for _ in range(EPOCHS):
        for images, noise in loader:
            drawn = g(noise)

            d_opt.zero_grad()
            d_loss = real(d(images)) + fake(d(drawn.detach()))
            d_loss.backward()
            d_opt.step()

            g_opt.zero_grad()
            g_loss = real(d(drawn))
            g_loss.backward()
            g_opt.step()
            print(d_loss.item(), g_loss.item(), len(images))
    ps.close()


if __name__ == "__main__":
    main()
