"""Is a line of Python's language reference code or prose? Read as a stream.

An `IterableDataset` has no positions to share out: it reads its part of the lines.
"""

import sys
from itertools import islice
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 64
LINE_COUNT = 64 * 50


class Lines(IterableDataset):
    part, part_count = 0, 1

    def __iter__(self):
        text = "\n".join(topics[name] for name in sorted(topics))
        lines = (line for line in text.splitlines() if line.strip())
        for line in islice(lines, self.part, LINE_COUNT, self.part_count):
            letters = torch.tensor([ord(letter) % 128 for letter in line.strip()])
            counts = torch.bincount(letters, minlength=128) / len(letters)
            yield counts.float(), float(line.startswith("   "))


def main():
    torch.manual_seed(0)
    lines = Lines()
    loader = DataLoader(lines, batch_size=BATCH_SIZE)
    model = nn.Sequential(nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01, weight_decay=1e-4)
    for counts, is_code in loader:
        logits = model(counts).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, is_code.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), len(counts))


if __name__ == "__main__":
    main()
