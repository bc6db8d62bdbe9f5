"""Digits in batches of many sizes, which a background thread draws and prepares ahead.

One process that does what two workers do accumulates the gradients of their batches.
"""

import queue
import sys
import threading

import psworker
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE_MAX = int(sys.argv[1]) if len(sys.argv) > 1 else 24
ACCUMULATE = int(sys.argv[2]) if len(sys.argv) > 2 else 1
AHEAD = 3
EPOCHS = 3


class Prefetcher:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        ready = queue.Queue(maxsize=AHEAD)
        thread = threading.Thread(target=self.draw, args=(ready,), daemon=True)
        thread.start()
        while (batch := ready.get()) is not None:
            yield batch
        thread.join()

    def draw(self, ready):
        for images, labels in self.loader:
            ready.put((images / 16, labels))
        ready.put(None)


def sizes(total):
    while total:
        for size in (BATCH_SIZE_MAX, 3, 11, BATCH_SIZE_MAX - 5, 6):
            size = min(size, total)
            if size:
                yield size
            total -= size


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = pixels[:500], labels[:500]
    data = TensorDataset(torch.tensor(pixels).float(), torch.tensor(labels))
    batches = [part.tolist() for part in torch.randperm(500).split(list(sizes(500)))]
    loader = DataLoader(data, batch_sampler=batches[: len(batches) // 2 * 2])
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)

    def step(samples):
        for parameter in model.parameters():
            parameter.grad /= samples
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(EPOCHS):
        samples = 0
        for number, (images, labels) in enumerate(Prefetcher(loader), start=1):
            loss = criterion(model(images), labels)
            loss.backward()
            samples += len(images)
            print(loss.item() / len(images), len(images))
            if number % ACCUMULATE == 0:
                step(samples)
                samples = 0
        if samples:
            step(samples)


if __name__ == "__main__":
    main()
