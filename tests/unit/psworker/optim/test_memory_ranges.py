"""Which tensors lie over the same memory."""

import pytest
import torch

from psworker.optim.memory_ranges import overlapping_pairs, overlaps_itself

WHOLE = torch.zeros(24)
MATRIX = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (WHOLE, WHOLE.view(4, 6)),
        (WHOLE[:13], WHOLE[12:]),
        (WHOLE[3:4], WHOLE),
        (MATRIX[:, :4], MATRIX[:, 3:]),
        (MATRIX.t(), MATRIX[1]),
        (MATRIX[::2], MATRIX[:, 2]),
        (WHOLE.view(torch.int32)[:2], WHOLE[1:]),
        (WHOLE[::2], WHOLE[::3]),
        (WHOLE.view(torch.uint8)[5:6], WHOLE[1]),
    ],
)
def test_tensors_with_a_byte_in_common_are_found(
    one: torch.Tensor, other: torch.Tensor
) -> None:
    apart = torch.zeros(24)
    assert list(overlapping_pairs([apart, one, other])) == [(1, 2)]
    assert list(overlapping_pairs([other, apart, one])) == [(0, 2)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (WHOLE[:12], WHOLE[12:]),
        (WHOLE[::2], WHOLE[1::2]),
        (MATRIX[:, :3], MATRIX[:, 3:]),
        (MATRIX[::2], MATRIX[1::2]),
        (MATRIX[:, 0], MATRIX[:, 5]),
        (MATRIX.t()[:2], MATRIX.t()[2:]),
        (WHOLE[:0], WHOLE),
        (torch.zeros(3), torch.zeros(3)),
    ],
)
def test_views_that_take_turns_in_one_memory_have_none(
    one: torch.Tensor, other: torch.Tensor
) -> None:
    assert not list(overlapping_pairs([one, other]))


def test_all_pairs_of_many_are_found() -> None:
    parts = [WHOLE[start : start + 4] for start in range(0, 24, 4)]
    assert not list(overlapping_pairs(parts))
    pairs = set(overlapping_pairs([*parts, WHOLE[2:9], WHOLE[20:]]))
    assert pairs == {(0, 6), (1, 6), (2, 6), (5, 7)}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(4),
        torch.zeros(3, 1).expand(3, 2),
        torch.zeros(8).unfold(0, 4, 2),
        torch.zeros(8).as_strided((3, 3), (1, 2)),
        torch.zeros(1).expand(1 << 25),
    ],
)
def test_an_expanded_view_overlaps_itself(tensor: torch.Tensor) -> None:
    assert overlaps_itself(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4),
        torch.zeros(()),
        torch.zeros(0, 3).expand(2, 0, 3),
        torch.zeros(5).expand(1, 5),
        MATRIX.t(),
        MATRIX[:, ::2],
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(8).unfold(0, 4, 4),
        # Strides of which none is beyond the reach of those below it.
        torch.zeros(16).as_strided((3, 2), (2, 3)),
    ],
)
def test_other_layouts_do_not(tensor: torch.Tensor) -> None:
    assert not overlaps_itself(tensor)
