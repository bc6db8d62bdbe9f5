"""State of optimizers that comes from outside: what it may be, and for which slices.

A shard that ran with state that its class can't use would fail in the middle of an
update, and the job with it. So everything is checked before it is staged.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from psserver.shard.tensors.chunk_image import copy_of
from psserver.shard.tensors.supported_optimizers import make_optimizer
from pswire.optimizer_states import SCALARS, ChunkState
from pswire.optimizers import SUPPORTED, SparseGradients, unflatten_group
from pswire.placement import Chunk
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, OptimizerSpec, ParameterGroup

_SWITCHED_ON = {"amsgrad": True, "centered": True, "momentum": 0.9}
"""What makes torch keep state that it does not always need."""


class Span(NamedTuple):
    """State of neighbouring slices, from `first` to `stop` without it."""

    first: int
    stop: int
    state: dict[str, torch.Tensor]


def spans_of(state: ChunkState) -> tuple[Span, ...]:
    """The state of a chunk by the slices that share it, in their order."""
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for key, value in state.items():
        found.setdefault((key.first, key.stop), {})[key.name] = value
    return tuple(Span(*place, found[place]) for place in sorted(found))


def check_state(
    spec: OptimizerSpec,
    chunk: Chunk,
    groups: Sequence[ParameterGroup | None],
    state: ChunkState,
) -> None:
    """Checks that an optimizer can go on from this state of a chunk.

    Args:
        spec: The optimizer.
        chunk: The chunk.
        groups: Group of each of its slices, None for those it never had.
        state: What came.

    Raises:
        Refusal: `CHUNK_INVALID`, or `HYPERPARAMETER_INVALID` for the state of another
            class or of other switches; with what was expected.
    """
    spans = spans_of(state)
    edges = [edge for span in spans for edge in span[:2]]
    if edges != sorted(edges) or (edges and edges[-1] > len(chunk.slices)):
        raise _refusal(chunk, f"it names slices twice, or beyond {len(chunk.slices)}")
    starts = [0, *accumulate(piece.element_count for piece in chunk.slices)]
    for span in spans:
        count = starts[span.stop] - starts[span.first]
        for name, value in span.state.items():
            expected = () if name in SCALARS else (count,)
            if tuple(value.shape) != expected or not value.is_floating_point():
                raise _refusal(
                    chunk,
                    f"{name[:64]!r} has shape {list(value.shape)} of {value.dtype}, "
                    f"where {list(expected)} floating numbers belong",
                )
            if name in SCALARS:
                _check_number(chunk, name, value.item())
        own = {
            group.hyperparameters
            for group in groups[span.first : span.stop]
            if group is not None
        }
        for hyperparameters in own:
            _check_names(spec, hyperparameters, frozenset(span.state))


def split(
    first: int, stop: int, spans: Sequence[Span], starts: Sequence[int]
) -> list[tuple[int, int, dict[str, torch.Tensor]]]:
    """Cuts neighbouring slices where their state ends.

    Args:
        first: First slice.
        stop: One past the last.
        spans: State, in order.
        starts: Where each slice begins in the chunk, in elements.

    Returns:
        First slice, one past the last, and state of each piece, empty where none is.
    """
    edges = {first, stop}
    for span in spans:
        edges |= {edge for edge in span[:2] if first < edge < stop}
    pieces = []
    for start, end in pairwise(sorted(edges)):
        state: dict[str, torch.Tensor] = {}
        for span in spans:
            if span.first <= start and end <= span.stop:
                begin = starts[start] - starts[span.first]
                state = {
                    name: part_of(value, begin, starts[end] - starts[start])
                    for name, value in span.state.items()
                }
        pieces.append((start, end, state))
    return pieces


def part_of(value: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """State of some of the elements: a view of them, a copy of a number."""
    return value[start : start + count] if value.ndim else value.clone()


def as_tensor(value: object, into: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of state, where a class keeps its count as an `int` too.

    Args:
        value: The state.
        into: As for `copy_of`.
    """
    if isinstance(value, torch.Tensor):
        return copy_of(value, into)
    assert isinstance(value, int), "all other state is of tensors"
    return torch.tensor(float(value))


def _check_number(chunk: Chunk, name: str, value: float) -> None:
    """A count of steps is divided by and counted on, `mu_product` is one of momenta."""
    is_count = name == "step"
    if not (
        0 <= value < math.inf and value == int(value) if is_count else 0 <= value <= 1
    ):
        wanted = (
            "a count of steps, a whole number from 0 on" if is_count else "in 0 to 1"
        )
        raise _refusal(chunk, f"{name!r} is {value}, which is not {wanted}")


def _check_names(
    spec: OptimizerSpec, hyperparameters: tuple[float, ...], names: frozenset[str]
) -> None:
    given = unflatten_group(spec.class_name, spec.hyperparameter_names, hyperparameters)
    needed = _names_of(spec.class_name, _frozen(given))
    known = _names_of(spec.class_name, _frozen({**given, **_SWITCHED_ON}))
    if spec.class_name == "SGD":
        needed = frozenset()  # torch begins with the gradient where there is none
    if not needed <= names <= known:
        wanted = ", ".join(sorted(needed)) or "nothing"
        raise Refusal(
            ErrorReason.HYPERPARAMETER_INVALID,
            f"{spec.name[:64]!r} is {spec.class_name} and goes on from {wanted}, but "
            f"its state holds {', '.join(sorted(names))[:128]}: the state of another "
            "class, or of other switches such as amsgrad",
        )


def _frozen(values: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(values.items()))


@lru_cache(maxsize=256)
def _names_of(
    class_name: str, values: tuple[tuple[str, object], ...]
) -> frozenset[str]:
    """Names of the state after a first update."""
    optimizer = make_optimizer(class_name, ElementType.FLOAT32)
    known = {key: value for key, value in values if key in optimizer.defaults}
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    if SUPPORTED[class_name].sparse is SparseGradients.REQUIRED:
        parameter.grad = parameter.grad.to_sparse()
    optimizer.param_groups[:] = [{**optimizer.defaults, **known, "params": [parameter]}]
    optimizer.step()
    return frozenset(optimizer.state[parameter])


def _refusal(chunk: Chunk, problem: str) -> Refusal:
    return Refusal(
        ErrorReason.CHUNK_INVALID,
        f"the optimizer state of chunk {chunk.index} can't be used: {problem}",
    )
