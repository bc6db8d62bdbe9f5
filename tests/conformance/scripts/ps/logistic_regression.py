"""Logistic regression on scikit-learn's breast cancer data, Adagrad.

The model is so small that all of it lies on one shard.
"""

import sys

import psworker
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
EPOCHS = 3


def main():
    torch.manual_seed(0)
    features, labels = load_breast_cancer(return_X_y=True)
    data = TensorDataset(torch.tensor(scale(features)).float(), torch.tensor(labels))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = nn.Linear(30, 1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, weight_decay=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for features, labels in loader:
            loss = criterion(model(features).squeeze(1), labels.float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item(), len(features))
    ps.close()


if __name__ == "__main__":
    main()
