"""One sample whose gradient overflows float16: a step that all skip, and go on.

One process that does what two workers do accumulates the gradients of two batches, and
one infinite element in either keeps it from stepping with both.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
ACCUMULATE = int(sys.argv[2]) if len(sys.argv) > 2 else 1
OVERFLOWING = 700


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float()
    images[OVERFLOWING] *= 10_000
    data = TensorDataset(images, torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for number, (images, labels) in enumerate(loader, start=1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss / ACCUMULATE).backward()
        print(loss.item(), len(images))
        if number % ACCUMULATE == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
