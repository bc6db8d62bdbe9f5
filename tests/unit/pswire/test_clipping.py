import math
import random
import sys

import pytest
import torch

from pswire.clipping import gradient_scale, is_clip_norm, norm_of, sum_of_parts


@pytest.mark.parametrize("clip_grad_norm", [1e-3, 0.5, 3.0, 4.0])
def test_it_is_what_torch_multiplies_by(clip_grad_norm: float) -> None:
    gradient = torch.tensor([2.0, 1.0, 2.0], dtype=torch.float64)
    parameter = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameter, clip_grad_norm)

    scale = gradient_scale(norm_of(9.0), clip_grad_norm)

    torch.testing.assert_close(gradient * scale, parameter.grad, rtol=1e-15, atol=0.0)


def test_nothing_is_scaled_without_a_clip() -> None:
    assert gradient_scale(1e18, 0.0) == 1.0


def test_a_scale_is_never_0() -> None:
    assert gradient_scale(1e18, sys.float_info.min) > 0


def test_parts_add_up_exactly_in_any_order() -> None:
    rng = random.Random(3)
    parts = [rng.random() * 10.0 ** rng.randint(-12, 12) for _ in range(50)]
    total = sum_of_parts(parts)
    for _ in range(5):
        rng.shuffle(parts)
        assert sum_of_parts(parts) == total
    assert total >= max(parts)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(1.0, True), (1e-30, True), (0.0, False), (-1.0, False), (math.inf, False)],
)
def test_a_norm_to_clip_to_is_finite_and_more_than_0(
    value: float, verdict: bool
) -> None:
    assert is_clip_norm(value) is verdict
    assert not is_clip_norm(math.nan)
