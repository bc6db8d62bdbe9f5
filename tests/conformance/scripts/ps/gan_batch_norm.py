"""An adversarial network with batch normalization, whose steps share one drawn batch.

A batch is normalized by its own statistics: one process that does what two workers do
accumulates the gradients of two batches. The generator's graph stands while the other
optimizer steps, and its running statistics are judged after every step.
"""

import sys

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
ACCUMULATE = int(sys.argv[2]) if len(sys.argv) > 2 else 1


def loss_of(logits, target):
    return nn.functional.binary_cross_entropy_with_logits(
        logits, torch.full_like(logits, target)
    )


@torch.no_grad()
def judge(g, noise):
    g.eval()
    drawn = g(noise).mean().item()
    g.train()
    return drawn


def main():
    torch.manual_seed(0)
    pixels = load_digits().data[:640]
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.randn(len(pixels), 8))
    held_out = torch.randn(64, 8)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    g = nn.Sequential(
        nn.Linear(8, 64, bias=False),
        nn.BatchNorm1d(64, momentum=None),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.Sigmoid(),
    )
    d = nn.Sequential(
        nn.Linear(64, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )
    g_opt = torch.optim.SGD(g.parameters(), lr=0.1, momentum=0.5)
    d_opt = torch.optim.SGD(d.parameters(), lr=0.05, momentum=0.5)
    ps = psworker.connect()
    g, d, g_opt, d_opt, loader = ps.prepare(g, d, g_opt, d_opt, loader)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) < ACCUMULATE:
            continue
        drawn = [g(noise) for _, noise in batches]

        d_opt.zero_grad()
        d_losses = []
        for (images, _), each in zip(batches, drawn, strict=True):
            d_losses.append(loss_of(d(images), 0.9) + loss_of(d(each.detach()), 0.0))
            (d_losses[-1] / ACCUMULATE).backward()
        d_opt.step()

        g_opt.zero_grad()
        g_losses = []
        for each in drawn:
            g_losses.append(loss_of(d(each), 0.9))
            (g_losses[-1] / ACCUMULATE).backward()
        g_opt.step()
        judged = judge(g, held_out)
        for d_loss, g_loss in zip(d_losses, g_losses, strict=True):
            print(d_loss.item(), g_loss.item(), judged, BATCH_SIZE)
        batches.clear()
    ps.close()


if __name__ == "__main__":
    main()
