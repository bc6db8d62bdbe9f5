"""The character transformer of `psctl compare --strategies`, and its text.

The text is Python's language reference, which comes with Python. Its last tenth is held
out. A sample is a window of it with the character that follows each of its own.
"""

from pydoc_data.topics import topics
from typing import Final

import torch
from torch import nn
from torch.utils.data import TensorDataset
from typing_extensions import override

from psworker.snapshots.snapshot import Snapshot

CONTEXT: Final = 24
"""Characters of a window."""
WIDTH: Final = 48
_HEADS: Final = 4

_MODEL_SEED: Final = 20
_HELD_OUT_SHARE: Final = 0.1
_EVERY_HELD_OUT: Final = 2
"""Of the held-out windows, one of so many is evaluated."""


class _Block(nn.Module):
    """Attention to earlier characters, and a network for each; no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.attended = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.widened = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.narrowed = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    @override
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended = self.attended(self.norms[0](hidden))
        heads = attended.unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        asked, keys, values = heads.unbind()
        mixed = nn.functional.scaled_dot_product_attention(
            asked, keys, values, is_causal=True
        )
        hidden = hidden + self.mixed(mixed.transpose(1, 2).flatten(2))
        widened = nn.functional.relu(self.widened(self.norms[1](hidden)))
        narrowed: torch.Tensor = self.narrowed(widened)
        return hidden + narrowed


class CharacterModel(nn.Module):
    """Predicts the next character after each of a window, from those before it.

    Small and plain, so that a step takes a few milliseconds: on a slow link it is
    exchanges that count.
    """

    def __init__(self, character_count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(character_count, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 10)
        self.blocks = nn.Sequential(_Block(), _Block())
        nn.init.normal_(self.embedding.weight, std=0.1)

    @override
    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Logits, (windows, CONTEXT, characters), of codes, (windows, CONTEXT)."""
        hidden = self.blocks(self.embedding(characters) + self.positions)
        return nn.functional.linear(hidden, self.embedding.weight)

    def loss(self, characters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of the characters that follow, in nats."""
        logits = self(characters).flatten(0, 1)
        return nn.functional.cross_entropy(logits, following.flatten())


class Characters:
    """Text to train on, and text that is held out."""

    def __init__(self) -> None:
        text = "".join(topics[name] for name in sorted(topics))
        alphabet = {each: code for code, each in enumerate(sorted(set(text)))}
        codes = torch.tensor([alphabet[each] for each in text])
        train_count = int(len(codes) * (1 - _HELD_OUT_SHARE))
        self._character_count = len(alphabet)
        self._train = codes[:train_count]
        held_out = codes[train_count:]
        starts = torch.arange(0, len(held_out) - CONTEXT, CONTEXT * _EVERY_HELD_OUT)
        self._held_out = _windows(held_out, starts)

    def new_model(self) -> CharacterModel:
        """The model as every worker begins with it."""
        torch.manual_seed(_MODEL_SEED)
        return CharacterModel(self._character_count)

    def samples(self, count: int, seed: int) -> TensorDataset:
        """So many windows from drawn places of the text, all of an epoch."""
        drawn = torch.Generator().manual_seed(seed)
        most = len(self._train) - CONTEXT
        starts = torch.randint(most, (count,), generator=drawn)
        return TensorDataset(*_windows(self._train, starts))

    def held_out_loss(self, model: CharacterModel) -> float:
        """Of the text that is held out, in nats a character."""
        with torch.no_grad():
            return float(model.loss(*self._held_out))

    def model_of(self, snapshot: Snapshot) -> CharacterModel:
        """The model of a job's snapshot."""
        model = self.new_model()
        model.load_state_dict(snapshot.state_dict(), strict=True)
        return model


def _windows(
    codes: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    places = starts[:, None] + torch.arange(CONTEXT)
    return codes[places], codes[places + 1]
