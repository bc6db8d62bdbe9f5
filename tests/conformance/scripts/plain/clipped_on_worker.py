"""A deep narrow network that needs `clip_grad_norm_` to train at this rate.

The script clips the gradient that it has, which is that of the whole batch where it
is the only worker. Several workers clip together by `prepare(clip_grad_norm=...)`.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    hidden = [layer for _ in range(5) for layer in (nn.Linear(24, 24), nn.Tanh())]
    model = nn.Sequential(nn.Linear(64, 24), *hidden, nn.Linear(24, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        print(loss.item(), norm.item(), len(images))


if __name__ == "__main__":
    main()
