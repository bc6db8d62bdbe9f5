"""Which optimizers take sparse gradients: refused here, before anything is sent.

As in torch. What torch says in the middle of a step would be said on a shard, to all
workers at once and far from the line that caused it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from pswire.limits import CHUNK_BYTES_MAX, CHUNK_ELEMENTS_MAX, MESSAGE_BYTES_MAX
from pswire.optimizers import SUPPORTED, SparseGradients
from pswire.schema import OptimizerSpec
from pswire.slice_rows import NUMBER_BYTES
from psworker.errors import UnsupportedError

_Values = Sequence[float]
"""Hyperparameters of a group, in the order of the wire."""

_ROWS_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (64 << 10)
"""Most that rows and their numbers may take of a message, beside all else in it."""

Groups = Sequence[_Values]
"""Those of all groups of an optimizer."""


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


def _sparse_problem(spec: OptimizerSpec, values: _Values) -> str | None:
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
