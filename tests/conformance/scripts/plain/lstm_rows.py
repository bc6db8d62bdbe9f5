"""Reads digits row by row with an LSTM, NAdam with a step schedule."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32


class RowReader(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.recurrent = nn.LSTM(8, width, num_layers=2, batch_first=True)
        self.output = nn.Linear(width, 10)

    def forward(self, images):
        _, (hidden, _) = self.recurrent(images)
        return self.output(hidden[-1])


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().reshape(-1, 8, 8)
    data = TensorDataset(images, torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = RowReader()
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    scheduler = StepLR(optimizer, step_size=20, gamma=0.3)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(loss.item(), len(images))


if __name__ == "__main__":
    main()
