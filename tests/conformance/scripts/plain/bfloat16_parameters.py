"""Digits with a model whose parameters are bfloat16.

One process rounds every update to bfloat16. The shards keep the values in float32 and
round what they send, so the two agree to bfloat16's rounding only. One process that
does what two workers do accumulates the gradients of two batches.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
ACCUMULATE = int(sys.argv[2]) if len(sys.argv) > 2 else 1


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).bfloat16()
    data = TensorDataset(images, torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for number, (images, labels) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(images).float(), labels)
        (loss / ACCUMULATE).backward()
        print(loss.item(), len(images))
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
