"""A critic that tells digits from noise, kept smooth by a penalty on its gradient.

The penalty is a loss of a gradient: the backward pass goes through a backward pass.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32


def main():
    torch.manual_seed(0)
    digits = torch.tensor(load_digits().data / 16).float()
    data = TensorDataset(digits, torch.rand_like(digits), torch.rand(len(digits), 1))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    critic = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    for images, noise, share in loader:
        between = (share * images + (1 - share) * noise).requires_grad_()
        judged = critic(between).sum()
        (slope,) = torch.autograd.grad(judged, between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        distance = critic(images).mean() - critic(noise).mean()
        loss = 10 * penalty - distance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(penalty.item(), distance.item(), len(images))


if __name__ == "__main__":
    main()
