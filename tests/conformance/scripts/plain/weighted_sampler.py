"""A rare class drawn more often: `WeightedRandomSampler` with replacement."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    is_eight = torch.tensor(labels == 8)
    data = TensorDataset(torch.tensor(pixels / 16).float(), is_eight.float())
    sampler = WeightedRandomSampler(torch.where(is_eight, 9.0, 1.0), 1500)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    for images, is_eight in loader:
        logits = model(images).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, is_eight)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), len(images))


if __name__ == "__main__":
    main()
