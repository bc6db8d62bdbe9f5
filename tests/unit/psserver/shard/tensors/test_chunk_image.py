"""Whether the values of a chunk are finite, also where their sum is not."""

import pytest
import torch

from psserver.shard.tensors.chunk_image import ChunkImage

INFINITE = float("inf")


@pytest.mark.parametrize(
    ("values", "is_finite"),
    [
        (torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1.0, INFINITE]), False),
        (torch.tensor([INFINITE, -INFINITE]), False),
        (torch.tensor([1.0, float("nan")]), False),
        (torch.full((4,), 3e38), True),
        (torch.tensor([60_000.0] * 3, dtype=torch.float16), True),
        (torch.tensor([2**62] * 4), True),
        (torch.tensor([True]), True),
        (torch.zeros(0), True),
    ],
)
def test_values_are_finite_whatever_their_sum_is(
    values: torch.Tensor, is_finite: bool
) -> None:
    assert ChunkImage(values).is_finite is is_finite
