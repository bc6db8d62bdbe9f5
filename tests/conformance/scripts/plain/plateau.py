"""Regression that lowers its rate when the validation loss stands still.

All workers judge the same held-out samples, so they lower it together.
"""

import sys

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 16
EPOCHS = 4


def main():
    torch.manual_seed(0)
    features, targets = load_diabetes(return_X_y=True)
    features = torch.tensor(features).float() * 20
    targets = torch.tensor(targets / 100).float()
    data = TensorDataset(features[:352], targets[:352])
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 200), nn.Softplus(), nn.Linear(200, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=2)
    criterion = nn.HuberLoss()
    for _ in range(EPOCHS):
        for inputs, wanted in loader:
            loss = criterion(model(inputs).squeeze(1), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                judged = criterion(model(features[352:]).squeeze(1), targets[352:])
            scheduler.step(judged)
            print(loss.item(), judged.item(), len(inputs))


if __name__ == "__main__":
    main()
