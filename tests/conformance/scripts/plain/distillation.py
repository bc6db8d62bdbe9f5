"""A small network learns from a large one, which stays as it is."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
TEMPERATURE = 3.0


def trained_teacher(images, labels):
    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(teacher.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(teacher(images), labels).backward()
        optimizer.step()
    return teacher


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    teacher = trained_teacher(*data.tensors)
    model = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for images, labels in loader:
        with torch.no_grad():
            wanted = (teacher(images) / TEMPERATURE).softmax(1)
        logits = model(images)
        learned = (logits / TEMPERATURE).log_softmax(1)
        loss = nn.functional.cross_entropy(logits, labels)
        loss = loss + nn.functional.kl_div(learned, wanted, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), len(images))


if __name__ == "__main__":
    main()
