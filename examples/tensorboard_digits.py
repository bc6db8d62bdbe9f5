"""The digits again, with a TensorBoard curve of what each step cost.

python examples/tensorboard_digits.py runs
tensorboard --logdir runs
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from psworker.integrations.tensorboard import StepWriter


def main(folder):
    torch.manual_seed(0)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    train_set = TensorDataset(pixels.float() / 16, labels)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    with psworker.connect() as ps:
        model, optimizer, loader = ps.prepare(model, optimizer, loader)
        with StepWriter(ps, f"{folder}/{ps.worker_id}") as writer:
            writer.watch(optimizer)
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                writer.note_loss(loss)
                optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
