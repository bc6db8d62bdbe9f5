"""Embeds digits so that those of one class are near each other.

The triplet loss is the soft one: a hinge that one process opens and another leaves
closed, over the last bit, would tell nothing about either."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32


class Triplets(Dataset):
    """For each image one of its class and one of another, drawn by its number."""

    def __init__(self):
        pixels, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels / 16).float()
        self.labels = torch.tensor(labels)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        is_same = self.labels == self.labels[index]
        chosen = [
            torch.multinomial(mask.float(), 1, generator=generator)[0]
            for mask in (is_same, ~is_same)
        ]
        return self.images[index], self.images[chosen[0]], self.images[chosen[1]]


def main():
    torch.manual_seed(0)
    loader = DataLoader(Triplets(), batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.Adamax(model.parameters(), lr=2e-3)
    for anchor, positive, negative in loader:
        embedded = model(anchor)
        near = nn.functional.pairwise_distance(embedded, model(positive))
        far = nn.functional.pairwise_distance(embedded, model(negative))
        loss = nn.functional.softplus(near - far).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), len(anchor))


if __name__ == "__main__":
    main()
