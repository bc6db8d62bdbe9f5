"""Next values of a noisy oscillation with a recurrent network, gradients clipped."""

import sys

import psworker
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 16
WINDOW = 24
NORM = 0.2


class Forecaster(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.recurrent = nn.GRU(1, width, batch_first=True)
        self.output = nn.Linear(width, 1)

    def forward(self, values):
        hidden, _ = self.recurrent(values.unsqueeze(2))
        return self.output(hidden).squeeze(2)


def main():
    torch.manual_seed(0)
    time = torch.arange(700) / 4
    series = time.sin() + 0.5 * (time / 3).cos() + 0.05 * torch.randn(len(time))
    windows = series.unfold(0, WINDOW + 1, 1)
    loader = DataLoader(TensorDataset(windows), batch_size=BATCH_SIZE, shuffle=True)
    model = Forecaster()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader, clip_grad_norm=NORM)
    for (values,) in loader:
        loss = nn.functional.mse_loss(model(values[:, :-1]), values[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), len(values))


if __name__ == "__main__":
    main()
