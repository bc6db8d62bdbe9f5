"""Delayed Nesterov against the algorithm of its paper, written out in numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pswire.delayed_nesterov import DelayedNesterov


def by_hand(
    values: np.ndarray[Any, Any],
    gradients: np.ndarray[Any, Any],
    *,
    rate: float,
    beta: float,
    size: int,
    c: float,
) -> np.ndarray[Any, Any]:
    """Algorithm 3 of arXiv:2401.09135, in its own letters."""
    theta, m, delta = values.copy(), np.zeros_like(values), np.zeros_like(values)
    for t, g in enumerate(gradients):
        delta += g
        if (t + 1) % size == 0:
            m = beta * m + delta / size
            theta -= rate * ((1 - c * size + c) * beta * m + g / size)
            delta[:] = 0
        else:
            theta -= rate * (c * beta * m + g / size)
    return theta


def trained(
    gradients: np.ndarray[Any, Any], made: torch.optim.Optimizer
) -> np.ndarray[Any, Any]:
    parameter = made.param_groups[0]["params"][0]
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        made.step()
    return np.asarray(parameter.detach().numpy())


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(5, dtype=torch.float64))


def drawn(count: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(count, 5))


@settings(derandomize=True, max_examples=50, deadline=None)
@given(
    count=st.integers(1, 23),
    seed=st.integers(0, 2**16),
    beta=st.sampled_from([0.0, 0.5, 0.9]),
    size=st.integers(1, 6),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_it_is_the_papers_algorithm(
    count: int, seed: int, beta: float, size: int, share: float
) -> None:
    gradients, c = drawn(count, seed), share / size
    held = parameter()
    made = DelayedNesterov(
        [held], lr=0.3, momentum=beta, buffer_size=size, activation=c
    )

    found = trained(gradients, made)

    expected = by_hand(np.arange(5.0), gradients, rate=0.3, beta=beta, size=size, c=c)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_a_buffer_of_one_is_nesterov_of_torch() -> None:
    gradients = drawn(10, 1)
    ours = DelayedNesterov([parameter()], lr=0.1, momentum=0.9, buffer_size=1)
    torchs = torch.optim.SGD([parameter()], lr=0.1, momentum=0.9, nesterov=True)

    np.testing.assert_allclose(
        trained(gradients, ours), trained(gradients, torchs), rtol=1e-12
    )


def test_a_closure_is_called_with_gradients_on() -> None:
    held = parameter()
    made = DelayedNesterov([held], buffer_size=1)

    def closure() -> torch.Tensor:
        made.zero_grad()
        loss = (held * held).sum()
        loss.backward()
        return loss

    assert made.step(closure) == 30.0
    assert held[-1] < 4


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lr": -0.1}, "lr is -0.1; it must be at least 0"),
        ({"momentum": -1.0}, "momentum is -1.0; it must be at least 0"),
        ({"buffer_size": 0}, "buffer_size is 0; it must be a whole number from 1"),
        ({"buffer_size": 1.5}, "buffer_size is 1.5; it must be a whole number from 1"),
        ({"buffer_size": 4, "activation": 0.5}, "from 0 to 1 / buffer_size, here 0.25"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DelayedNesterov([parameter()], **values)
