"""The gradient of one step: what is present, whether it is finite, what is spent.

An optimizer that can't take a gradient, sparse or dense, is refused here, before
anything is sent, as torch does: on a shard it would be said to all workers at once, and
far from the line that caused it.
"""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from pswire.limits import (
    CHUNK_BYTES_MAX,
    CHUNK_ELEMENTS_MAX,
    GRADIENT_NORM_MAX,
    MESSAGE_BYTES_MAX,
    PUSH_WEIGHT_MAX,
)
from pswire.optimizers import SUPPORTED, SparseGradients
from pswire.schema import OptimizerSpec
from pswire.slice_rows import NUMBER_BYTES
from psworker.errors import ConfigurationError, UnsupportedError
from psworker.optim.step_contents import Groups

_ROWS_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (64 << 10)
"""Most that rows and their numbers may take of a message, beside all else in it."""


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
    if weight is not None and not 0 <= weight <= PUSH_WEIGHT_MAX:
        raise ConfigurationError(
            f"weight={weight} is not a number of samples: give one from 0 to "
            f"{PUSH_WEIGHT_MAX:g}"
        )


def refuse_modules(
    models: Mapping[str, nn.Module],
    tensors: Sequence[torch.Tensor],
    specs: Mapping[str, OptimizerSpec],
) -> None:
    """Refuses modules whose sparse gradient their optimizer can't take.

    A weight that other modules use too gets a dense gradient from them, which only the
    step can see. Models and optimizers are by their names in the job.

    Raises:
        UnsupportedError: With the module and the cures.
    """
    groups = {
        id(tensors[index]): (spec, position)
        for spec in specs.values()
        for position, group in enumerate(spec.groups)
        for index in group.entry_indexes
    }
    for label, module, is_alone in _sparse_modules(models):
        spec, position = groups.get(id(module.weight), (None, 0))
        if spec is None or not is_alone or not module.weight.requires_grad:
            continue
        values = spec.groups[position].hyperparameters
        problem = _sparse_problem(spec, values)
        if problem is not None:
            raise UnsupportedError(
                f"{label} has sparse=True, and its weight is in group {position} of "
                f"{spec.name!r}: {problem}"
            )


def refuse_gradients(
    spec: OptimizerSpec,
    groups: Groups,
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Refuses gradients that an optimizer can't take, sparse or dense.

    Raises:
        UnsupportedError: With the cures. Nothing was sent.
    """
    for position, group in enumerate(spec.groups):
        for index in group.entry_indexes:
            gradient = gradients[index]
            if gradient is None:
                continue
            problem = (
                _sparse_problem(spec, groups[position]) or _size_problem(gradient)
                if gradient.is_sparse
                else _dense_problem(spec)
            )
            if problem is not None:
                kind = "sparse" if gradient.is_sparse else "dense"
                raise UnsupportedError(
                    f"a parameter of shape {list(gradient.shape)} in group {position} "
                    f"of {spec.name!r} has a {kind} gradient: {problem}"
                )


def _sparse_problem(spec: OptimizerSpec, values: Sequence[float]) -> str | None:
    """Why a sparse gradient can't be taken, with the cures."""
    if SUPPORTED[spec.class_name].sparse is SparseGradients.REFUSED:
        return (
            f"{spec.class_name} does not take sparse gradients, in torch neither; "
            "build the module with sparse=False, or give its weight to a "
            "torch.optim.SparseAdam of its own"
        )
    named = dict(zip(spec.hyperparameter_names, values, strict=True))
    decay = named.get("weight_decay", 0.0)
    if decay:
        return (
            f"{spec.class_name} with weight_decay={decay:g} does not take sparse "
            "gradients, in torch neither, since the decay would change every row; put "
            "the weight into a group with weight_decay=0, or build the module with "
            "sparse=False"
        )
    return None


def _size_problem(gradient: torch.Tensor) -> str | None:
    """Why rows can't be sent: numbers of very short ones are most of a message."""
    row_length = math.prod(gradient.shape[1:])
    row_bytes = row_length * gradient.element_size()
    chunk_rows = min(
        CHUNK_BYTES_MAX // max(row_bytes, 1), CHUNK_ELEMENTS_MAX // max(row_length, 1)
    )
    row_count = min(gradient._nnz(), chunk_rows)
    if row_count * (row_bytes + NUMBER_BYTES) <= _ROWS_BYTES_MAX:
        return None
    return (
        f"it has {gradient._nnz()} rows of {row_bytes} bytes, whose numbers do not fit "
        "a message; build the module with sparse=False"
    )


def _dense_problem(spec: OptimizerSpec) -> str | None:
    """Why a dense gradient can't be taken, with the cures."""
    if SUPPORTED[spec.class_name].sparse is not SparseGradients.REQUIRED:
        return None
    return (
        f"{spec.class_name} takes sparse gradients only, as in torch; give the "
        "parameter to torch.optim.Adam, or, if it is an embedding's, build that with "
        "sparse=True and use its weight nowhere else"
    )


def _sparse_modules(
    models: Mapping[str, nn.Module],
) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag, bool]]:
    """Modules with `sparse=True`, and whether their weight has only that one use."""
    for model_name, model in models.items():
        uses: dict[int, int] = {}
        for _, parameter in model.named_parameters(remove_duplicate=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                label = f"{name or type(module).__name__} of {model_name}"
                yield label, module, uses[id(module.weight)] == 1
