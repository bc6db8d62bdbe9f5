"""The gradient of one step: what is present, whether it is finite, what is spent."""

import math
import weakref
from collections.abc import Iterator, Sequence

import torch

from pswire.limits import GRADIENT_NORM_MAX
from pswire.schema import OptimizerSpec
from psworker.errors import ConfigurationError, UnsupportedError
from psworker.optim.sparse_gradients import Groups, refuse_gradients


def gradients_of(
    spec: OptimizerSpec, groups: Groups, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients that an optimizer steps with, `None` for entries without one.

    Raises:
        UnsupportedError: The optimizer can't take one of them.
    """
    own = set(spec.entry_indexes)
    found = collect_gradients(
        [tensor if index in own else None for index, tensor in enumerate(tensors)]
    )
    refuse_gradients(spec, groups, found)
    return found


def collect_gradients(
    parameters: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The gradient of each parameter, `None` where there is none; not a copy.

    Sparse gradients are coalesced in place, so that each row is there once in the order
    of rows.

    Raises:
        UnsupportedError: A gradient is sparse otherwise than by rows.
    """
    return [
        None if parameter is None else _gradient_of(parameter)
        for parameter in parameters
    ]


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = parameter.grad
    if gradient is None or gradient.layout is torch.strided:
        return gradient
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise UnsupportedError(
            f"a gradient of shape {list(gradient.shape)} is sparse otherwise than by "
            "whole rows, as an embedding makes it; make it dense before step(), as in "
            "`parameter.grad = parameter.grad.to_dense()`, or compute it without "
            "sparse_grad=True"
        )
    if not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return gradient


def stored_elements(gradient: torch.Tensor) -> torch.Tensor:
    """The elements that a gradient has: of a sparse one its values, sharing memory."""
    return gradient._values() if gradient.is_sparse else gradient


@torch.no_grad()
def norm_of(gradients: Sequence[torch.Tensor | None]) -> float:
    """The L2 norm of all gradients; may be infinite or not a number.

    One pass. The norm of each tensor is accumulated in float32, or in float64 where
    its elements are.
    """
    elements = [stored_elements(each) for each in gradients if each is not None]
    present = [each for each in elements if each.numel()]
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
    present = [stored_elements(each) for each in gradients if each is not None]
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


class SpentGradients:
    """The gradients of the last push of each parameter.

    A script may call `zero_grad()` right before `backward()` instead of right after
    `step()`. Between two steps the gradient of the last one is in `.grad` still, and is
    no sign that another one was begun.
    """

    def __init__(self, entry_count: int) -> None:
        # Weak, so that it costs no memory once it was set to `None`; with torch's count
        # of changes in place.
        self._marks: list[tuple[weakref.ref[torch.Tensor], int] | None]
        self._marks = [None] * entry_count

    def note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """A push carries these, one for each entry; what is `None` stays as it was."""
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._marks[index] = weakref.ref(gradient), gradient._version

    def has_new(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether any parameter has a gradient that no push carried as it is now."""
        return any(True for _ in self._new(parameters))

    def differ_from(self, parameters: Sequence[torch.Tensor]) -> bool:
        """As `has_new`; notes those that there are."""
        is_other = self.has_new(parameters)
        self.note([parameter.grad for parameter in parameters])
        return is_other

    def has_others(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether any parameter has a gradient that no push carried and is not zero."""
        return any(bool(stored_elements(g).any()) for g in self._new(parameters))

    def _new(self, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for parameter, mark in zip(parameters, self._marks, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            is_spent = mark is not None and (
                mark[0]() is gradient and mark[1] == gradient._version
            )
            if not is_spent:
                yield gradient


def check_weight(weight: float | None) -> None:
    """Checks what was given as `step(weight=...)`.

    Raises:
        ConfigurationError: It is no number of samples.
    """
    if weight is not None and not (math.isfinite(weight) and weight >= 0):
        raise ConfigurationError(
            f"weight={weight} is not a number of samples: it must be finite and at "
            "least 0"
        )
