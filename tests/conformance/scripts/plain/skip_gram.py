"""Word vectors by skip-gram with negative samples, sparse embeddings and SGD.

Each pair of neighbouring words comes with words drawn at random, once, before training.
"""

import re
import sys
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 256
WORD_COUNT = 6_000
NEGATIVE_COUNT = 4
STEPS = 47


class SkipGram(nn.Module):
    def __init__(self, word_count, width=24):
        super().__init__()
        self.words = nn.Embedding(word_count, width, sparse=True)
        self.contexts = nn.Embedding(word_count, width, sparse=True)
        nn.init.normal_(self.words.weight, std=0.3)
        nn.init.normal_(self.contexts.weight, std=0.3)

    def forward(self, words, contexts):
        return (self.words(words).unsqueeze(1) * self.contexts(contexts)).sum(2)


def load_pairs():
    text = " ".join(topics[name] for name in sorted(topics)).lower()
    words = re.findall("[a-z]+", text)[:WORD_COUNT]
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).items())}
    codes = torch.tensor([numbers[word] for word in words])
    centres = codes[1:-1].repeat(2)
    neighbours = torch.cat([codes[:-2], codes[2:]])
    others = codes[torch.randint(len(codes), (len(centres), NEGATIVE_COUNT))]
    contexts = torch.cat([neighbours.unsqueeze(1), others], dim=1)
    return TensorDataset(centres, contexts), len(numbers)


def main():
    torch.manual_seed(0)
    data, word_count = load_pairs()
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = SkipGram(word_count)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    wanted = torch.tensor([1.0] + [0.0] * NEGATIVE_COUNT)
    for words, contexts in loader:
        logits = model(words, contexts)
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, wanted.expand_as(logits)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(loss.item(), len(words))


if __name__ == "__main__":
    main()
