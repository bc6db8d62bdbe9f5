"""Federated averaging on handwritten digits: each worker has data of its own.

psserver local --shards 2 --listen 127.0.0.1:7070 --state-dir state --min-workers 10
psworker run --coordinator 127.0.0.1:7070 --nproc 10 -- examples/federated_digits.py

Prints the accuracy on data that nobody trains on, each client after its own rounds.
Options: the share of the workers in a round, the epochs that each of them trains, how
alike their data is, and the rounds. Which part of the data is a worker's own follows
from PS_LOCAL_RANK, so start all of them on one machine.
"""

import argparse
import os

import psworker
import torch
from psworker.data import split
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parts_of(labels, client_count, concentration):
    """A part for each client and one for tests; unlike each other if asked for."""
    held = split(
        len(labels), by="class", labels=labels, parts={"train": 0.8, "test": 0.2}
    )
    mine = labels[held.train]
    parts = {f"client {each}": 1 / client_count for each in range(client_count)}
    if client_count == 1:
        return [held.train], held.test
    if concentration:
        dealt = split(
            len(mine),
            by="dirichlet",
            labels=mine,
            parts=parts,
            concentration=concentration,
        )
    else:
        dealt = split(len(mine), parts=parts)
    return [held.train[dealt[name]] for name in parts], held.test


def train(ps, client, client_count, options, model, show):
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels / 16).float(), torch.tensor(labels)
    parts, test = parts_of(labels, client_count, options.concentration)
    own = TensorDataset(images[parts[client]], targets[parts[client]])
    order = torch.Generator().manual_seed(client)
    loader = DataLoader(own, batch_size=10, shuffle=True, generator=order)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate)
    strategy = psworker.FedAvg(
        every=options.epochs * len(loader), fraction=options.fraction
    )
    model, optimizer = ps.prepare(model, optimizer, strategy=strategy)
    while ps.clock < options.rounds:
        for _ in range(options.epochs):
            for inputs, classes in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), classes).backward()
                optimizer.step()
        with torch.no_grad():
            right = model(images[test]).argmax(1) == targets[test]
        show(ps.clock, right.float().mean().item())


def options_of(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fraction", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--concentration", type=float, default=0.1, help="0: all alike")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--rate", type=float, default=0.05)
    return parser.parse_args(arguments)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


if __name__ == "__main__":
    client = int(os.environ.get("PS_LOCAL_RANK", "0"))
    client_count = int(os.environ.get("PS_LOCAL_SIZE", "1"))
    with psworker.connect() as ps:
        train(
            ps,
            client,
            client_count,
            options_of(),
            make_model(),
            lambda clock, right: print(f"round {clock}: {right:.3f}", flush=True),
        )
