"""The gradient of one step: what is present, and whether it is finite."""

import math
from collections.abc import Sequence

import torch

from pswire.limits import GRADIENT_NORM_MAX
from psworker.errors import UnsupportedError


def collect_gradients(
    parameters: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The gradient of each parameter, `None` where there is none.

    Args:
        parameters: One for each entry of the schema, `None` for those that the
            optimizer does not hold.

    Raises:
        UnsupportedError: A gradient is sparse.
    """
    gradients = [
        None if parameter is None else parameter.grad for parameter in parameters
    ]
    for gradient in gradients:
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"a gradient of shape {list(gradient.shape)} is sparse, which this "
                "release does not send; build the module with sparse=False"
            )
    return gradients


@torch.no_grad()
def norm_of(gradients: Sequence[torch.Tensor | None]) -> float:
    """The L2 norm of all gradients; may be infinite or not a number.

    One pass. The norm of each tensor is accumulated in float32, or in float64 where
    its elements are.
    """
    present = [each for each in gradients if each is not None and each.numel()]
    if not present:
        return 0.0
    wide = [each for each in present if each.dtype == torch.float64]
    narrow = [each for each in present if each.dtype != torch.float64]
    norms = _numbers(torch._foreach_norm(wide)) if wide else []
    if narrow:
        norms += _numbers(torch._foreach_norm(narrow, 2, torch.float32))
    # As Python's floats, whose squares of float32 can't overflow.
    return math.sqrt(sum(norm * norm for norm in norms))


def is_finite(norm: float) -> bool:
    """The verdict on a gradient: whether its norm is a number, and at most 1e18."""
    return norm <= GRADIENT_NORM_MAX


@torch.no_grad()
def unscale(gradients: Sequence[torch.Tensor | None], scale: torch.Tensor) -> float:
    """Divides gradients by the loss scale they carry, in place as torch does.

    Not where some are of float16, whose small elements the scale is there to keep:
    shards divide them in float32, as torch's fused optimizers do.

    Returns:
        The scale that they still carry.
    """
    present = [each for each in gradients if each is not None]
    if any(each.dtype == torch.float16 for each in present):
        return float(scale.item())
    inverse = scale.double().reciprocal().item()
    if present:
        torch._foreach_mul_(present, inverse)
    return 1.0


def _numbers(norms: Sequence[torch.Tensor]) -> list[float]:
    """Norms as numbers, with one wait for a device however many there are."""
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.cpu() for norm in norms]
    numbers: list[float] = torch.stack(list(norms)).tolist()
    return numbers
