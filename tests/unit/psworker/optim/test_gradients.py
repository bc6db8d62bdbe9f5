import math
from collections.abc import Sequence

import pytest
import torch

from psworker.errors import UnsupportedError
from psworker.optim import gradients


def with_gradient(gradient: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def test_absent_gradients_keep_their_place() -> None:
    first = with_gradient(torch.ones(2))
    second = torch.nn.Parameter(torch.zeros(2))

    found = gradients.collect_gradients([None, first, second])

    assert found[0] is None
    assert found[1] is first.grad
    assert found[2] is None


def embedding_with_gradient(*rows: int) -> torch.nn.Embedding:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor(rows, dtype=torch.int64)).sum().backward()
    return embedding


def test_a_sparse_gradient_is_coalesced_once() -> None:
    embedding = embedding_with_gradient(3, 1, 3)

    (found,) = gradients.collect_gradients([embedding.weight])

    assert found is not None
    assert found.indices().tolist() == [[1, 3]]
    assert found.values().tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert embedding.weight.grad is found
    assert gradients.collect_gradients([embedding.weight])[0] is found


def test_a_gradient_that_is_sparse_within_rows_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    places = torch.tensor([[0], [2]])
    torch.gather(parameter, 1, places, sparse_grad=True).sum().backward()

    with pytest.raises(
        UnsupportedError, match=r"shape \[2, 3\] .* by whole rows, .*dense"
    ):
        gradients.collect_gradients([parameter])


def test_a_gradient_in_another_sparse_layout_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.eye(2, 3).to_sparse_coo()

    with pytest.raises(UnsupportedError, match=r"parameter\.grad\.to_dense"):
        gradients.collect_gradients([parameter])


@pytest.mark.parametrize(("value", "verdict"), [(1.0, True), (math.nan, False)])
def test_the_verdict_looks_at_the_values_of_sparse_gradients(
    value: float, verdict: bool
) -> None:
    embedding = embedding_with_gradient(3, 1)
    found = gradients.collect_gradients([embedding.weight])
    assert found[0] is not None
    found[0].values()[1, 0] = value

    assert verdict_on(found) is verdict
    assert verdict_on([*found, torch.ones(2)]) is verdict


def test_sparse_gradients_are_unscaled_in_place() -> None:
    embedding = embedding_with_gradient(3, 1, 3)
    found = gradients.collect_gradients([embedding.weight])

    gradients.unscale(found, torch.tensor(4.0))

    assert embedding.weight.grad is not None
    assert embedding.weight.grad.to_dense()[:, 0].tolist() == [0.0, 0.25, 0.0, 0.5]


def verdict_on(held: Sequence[torch.Tensor | None]) -> bool:
    return gradients.is_finite(gradients.norm_of(held))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (1.0, True),
        (1e17, True),
        (2e18, False),
        (math.inf, False),
        (-math.inf, False),
        (math.nan, False),
    ],
)
def test_the_verdict_is_a_bound_on_the_norm(
    dtype: torch.dtype, value: float, verdict: bool
) -> None:
    gradient = torch.zeros(5, dtype=dtype)
    gradient[3] = value

    assert verdict_on([None, torch.ones(3), gradient]) is verdict


def test_the_norm_is_over_all_gradients_together() -> None:
    near = torch.full((1,), 0.8e18)

    assert verdict_on([near])
    assert not verdict_on([near, near])


def test_float16_is_accumulated_in_float32() -> None:
    assert verdict_on([torch.full((100_000,), 60_000.0).half()])


def test_a_float64_beyond_float32_does_not_count_as_finite() -> None:
    assert not verdict_on([torch.tensor([1e300], dtype=torch.float64)])


def test_nothing_at_all_is_finite() -> None:
    assert verdict_on([None, torch.empty(0)])


def test_unscaling_divides_in_place() -> None:
    gradient = torch.full((2,), 8.0)

    gradients.unscale([None, gradient], torch.tensor(4.0))

    assert gradient.tolist() == [2.0, 2.0]


def test_a_loss_scale_stays_on_gradients_of_float16() -> None:
    small = torch.tensor([2.0**-10]).half()
    wide = torch.tensor([8.0])
    assert gradients.unscale([small, None, wide], torch.tensor(2.0**16)) == 2.0**16
    assert (small.item(), wide.item()) == (2.0**-10, 8.0)
    assert gradients.unscale([None, wide], torch.tensor(4.0)) == 1.0
    assert wide.item() == 2.0
