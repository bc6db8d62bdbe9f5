"""A transformer that predicts the next character of Python's language reference.

The embedding and the output layer share one matrix, only matrices decay, and the
learning rate warms up and then follows a cosine, step by step.
"""

import sys
from pydoc_data.topics import topics

import psworker
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = int(sys.argv[1]) if len(sys.argv) > 1 else 32
STEPS = 40
WARMUP_STEPS = 8
CONTEXT = 24
WIDTH = 32


class CharacterModel(nn.Module):
    def __init__(self, character_count):
        super().__init__()
        self.embedding = nn.Embedding(character_count, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 10)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, character_count, bias=False)
        self.output.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, characters):
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.embedding(characters) + self.positions
        return self.output(self.blocks(hidden, mask=mask, is_causal=True))


def load_text():
    text = "".join(topics[name] for name in sorted(topics))
    text = text[: STEPS * 32 * CONTEXT + 1]
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(character) for character in text])
    windows = codes[:-1].reshape(-1, CONTEXT), codes[1:].reshape(-1, CONTEXT)
    return TensorDataset(*windows), len(alphabet)


def main():
    torch.manual_seed(0)
    data, character_count = load_text()
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = CharacterModel(character_count)
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=5e-3,
        betas=(0.9, 0.95),
    )
    scheduler = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, 0.1, total_iters=WARMUP_STEPS),
            CosineAnnealingLR(optimizer, STEPS - WARMUP_STEPS),
        ],
        milestones=[WARMUP_STEPS],
    )
    ps = psworker.connect()
    optimizer, loader, scheduler = ps.prepare(model, optimizer, loader, scheduler)[1:]
    for characters, following in loader:
        logits = model(characters)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(loss.item(), len(characters))
    ps.close()


if __name__ == "__main__":
    main()
