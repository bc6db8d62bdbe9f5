"""A timer's handler saves while training goes on, as one for a signal to end does."""

import io
import signal
import sys
import time

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
INTERVAL_S = 0.05


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)

    def save(*_):
        began_s = time.monotonic()
        try:
            torch.save([model.state_dict(), optimizer.state_dict()], io.BytesIO())
        except ValueError as error:
            print(f"not saved: {error}", file=sys.stderr)
        # Most of the time is to train, on a busy machine too.
        took_s = time.monotonic() - began_s
        signal.setitimer(signal.ITIMER_REAL, INTERVAL_S + 4 * took_s)

    signal.signal(signal.SIGALRM, save)
    signal.setitimer(signal.ITIMER_REAL, INTERVAL_S)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), len(images))
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    ps.close()


if __name__ == "__main__":
    main()
