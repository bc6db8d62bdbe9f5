"""Data sets without positions."""

from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset


class Numbers(IterableDataset[torch.Tensor]):
    """The first few numbers, one a sample."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number)]) for number in range(self._count))
