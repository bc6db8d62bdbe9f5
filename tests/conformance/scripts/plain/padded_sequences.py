"""Which alphabet is a letter of? From the rest of its Unicode name, read as characters.

Names differ in length: a collate function of the script's own pads those of a batch.
"""

import sys
import unicodedata

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
ALPHABETS = ["ARABIC", "CYRILLIC", "GREEK", "HEBREW", "LATIN"]


def load_names():
    samples = []
    for code in range(0x0100, 0x0700):
        alphabet, _, rest = unicodedata.name(chr(code), "").partition(" ")
        if alphabet in ALPHABETS and rest:
            codes = torch.tensor([ord(letter) - 31 for letter in rest])
            samples.append((codes, ALPHABETS.index(alphabet)))
    return samples


def collate(samples):
    names, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(name) for name in names])
    return pad_sequence(names, batch_first=True), lengths, torch.tensor(labels)


class NameReader(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(64, width, padding_idx=0)
        self.recurrent = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * width, len(ALPHABETS))

    def forward(self, names, lengths):
        packed = pack_padded_sequence(
            self.embedding(names), lengths, batch_first=True, enforce_sorted=False
        )
        _, hidden = self.recurrent(packed)
        return self.output(hidden.transpose(0, 1).flatten(1))


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        load_names(), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate
    )
    model = NameReader()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for names, lengths, labels in loader:
        loss = nn.functional.cross_entropy(model(names, lengths), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), len(names))


if __name__ == "__main__":
    main()
