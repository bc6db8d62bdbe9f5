"""Do two images show the same digit? Two towers with the same weights.

The pairs are drawn once, before training, so that a pair is a sample as any other.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
PAIR_COUNT = 1300
MARGIN = 1.0


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.right = self.left

    def forward(self, one, other):
        return nn.functional.pairwise_distance(self.left(one), self.right(other))


def main():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(pixels / 16).float(), torch.tensor(labels)
    one, other = torch.randint(len(pixels), (2, PAIR_COUNT))
    other[::2] = (one[::2] + 10) % len(pixels)
    is_same = (labels[one] == labels[other]).float()
    data = TensorDataset(pixels[one], pixels[other], is_same)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = Siamese()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for one, other, is_same in loader:
        distance = model(one, other)
        near = is_same * distance.square()
        far = (1 - is_same) * (MARGIN - distance).clamp(min=0).square()
        loss = (near + far).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), len(one))


if __name__ == "__main__":
    main()
