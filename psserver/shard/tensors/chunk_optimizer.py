"""One optimizer over one chunk: the user's own class of `torch.optim`, on flat slices.

PyTorch keeps state for each parameter. Here neighbouring slices that had the same
history, the same hyperparameters and presence at every update, share it: they are one
*run*, one flat tensor to torch, so that thousands of small parameters cost one kernel.
A run splits, its state with it, when its slices stop being treated alike, and never
joins again. A slice that is absent is skipped as torch skips a parameter whose
gradient is `None`.

A sparse gradient of rows reaches torch as a sparse vector of elements. The optimizers
that take one are elementwise, so that it is the same arithmetic. Where torch can't, or
has nothing to gain, zeros are filled in: see `_is_applied_sparse`.

Not thread-safe; different chunks are independent.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from types import MappingProxyType
from typing import Any

import torch

from psserver.shard.tensors.optimizer_state import as_tensor, part_of, spans_of, split
from psserver.shard.tensors.sparse_mean import Positions
from psserver.shard.tensors.supported_optimizers import make_optimizer
from pswire.optimizer_states import ChunkState, StateKey, as_count
from pswire.optimizers import SUPPORTED, SparseGradients, unflatten_group
from pswire.placement import Chunk, Slice
from pswire.schema import OptimizerSpec
from pswire.torch_types import element_type_of

Treatment = tuple[tuple[float, ...], bool]
"""Hyperparameters, and whether the gradient is sparse."""


@dataclass(slots=True, eq=False)
class _Run:
    """Adjacent slices with one history.

    Attributes:
        first: First slice, by its position in the chunk.
        stop: One past the last slice.
        start: Where it begins in the chunk, in elements.
        parameter: Its elements, a view of the shard's vector.
        step_count: Updates so far.
    """

    first: int
    stop: int
    start: int
    parameter: torch.Tensor
    step_count: int = 0


class ChunkOptimizer:
    """State and update of one (optimizer, chunk).

    Attributes:
        spec: The optimizer, as it was declared.
        membership: Which slices the optimizer has.
        element_count: Elements of these slices.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        chunk: Chunk,
        group_of_entry: Mapping[int, int],
        values: torch.Tensor,
        *,
        stateful_entries: Collection[int] = (),
    ) -> None:
        """Allocates nothing: state is made at the first update.

        Args:
            spec: The optimizer.
            chunk: The chunk.
            group_of_entry: Group of each entry that the optimizer has.
            values: Elements of the chunk, 1-D, to be updated in place: its master
                values where it has any.
            stateful_entries: Entries whose state is kept beside those that it has.
        """
        self.spec = spec
        self._chunk = chunk
        self._values = values
        self._groups = tuple(
            group_of_entry.get(piece.entry_index) for piece in chunk.slices
        )
        self.membership = tuple(group is not None for group in self._groups)
        self.element_count = sum(
            piece.element_count
            for piece, is_member in zip(chunk.slices, self.membership, strict=True)
            if is_member
        )
        self._is_stateful = tuple(
            is_member or piece.entry_index in stateful_entries
            for piece, is_member in zip(chunk.slices, self.membership, strict=True)
        )
        self._torch = make_optimizer(spec.class_name, element_type_of(values.dtype))
        for each in SUPPORTED[spec.class_name].hyperparameters:
            if each.from_defaults:
                position = spec.hyperparameter_names.index(each.name)
                declared = spec.groups[0].hyperparameters[position]
                self._torch.defaults[each.name] = declared
        self._runs = self._first_runs()
        self._present_runs: list[_Run] = []
        self._planned_for: tuple[object, ...] | None = None
        # torch wraps `step` for profilers and compilers, 60 us of held GIL a call.
        self._step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(
            type(self._torch).step
        )

    @property
    def run_count(self) -> int:
        """Runs now; a measure of what an update costs."""
        return len(self._runs)

    @property
    def state_byte_count(self) -> int:
        """Bytes of torch's state. May be asked for during an update."""
        return sum(
            value.nbytes
            for state in list(self._torch.state.values())
            for value in list(state.values())
            if isinstance(value, torch.Tensor)
        )

    def step_count(self, slice_position: int) -> int:
        """Updates of a slice so far; torch's own count where its class keeps one."""
        for run in self._runs:
            if run.first <= slice_position < run.stop:
                state = self._torch.state.get(run.parameter, {})
                return int(state.get("step", run.step_count))
        return 0

    def export(
        self, into: ChunkState = MappingProxyType({})
    ) -> dict[StateKey, torch.Tensor]:
        """A copy of the state of all slices that have any.

        Args:
            into: State that is not needed any more, whose memory the copy takes.
        """
        return {
            (key := StateKey(run.first, run.stop, name)): as_tensor(
                value, into.get(key)
            )
            for run in self._runs
            for name, value in self._torch.state.get(run.parameter, {}).items()
            if value is not None
        }

    def load(self, state: ChunkState) -> None:
        """Goes on from this state; slices that it does not name are without any.

        Args:
            state: Checked by `check_state`; kept. Of slices that the optimizer never
                had it is not read.
        """
        spans = spans_of(state)
        starts = [0, *accumulate(piece.element_count for piece in self._chunk.slices)]
        self._torch.state.clear()
        self._planned_for = None
        runs: list[_Run] = []
        for run in self._first_runs():
            for first, stop, own in split(run.first, run.stop, spans, starts):
                parameter = at_origin(self._values[starts[first] : starts[stop]])
                step_count = int(own.get("step", torch.tensor(0.0)))
                runs.append(_Run(first, stop, starts[first], parameter, step_count))
                if own:
                    self._torch.state[parameter] = {
                        name: value.to(parameter.dtype)
                        if value.ndim
                        else as_count(self.spec.class_name, value)
                        for name, value in own.items()
                    }
        self._runs = runs

    def apply(
        self,
        gradient: torch.Tensor,
        presence: tuple[bool, ...],
        hyperparameters: Sequence[tuple[float, ...]],
        positions: Positions | None = None,
    ) -> None:
        """Updates the present slices in place.

        Args:
            gradient: Elements of the present slices, 1-D, of the type of the values; of
                a sparse slice those at its positions. Only read, and not kept.
            presence: Which slices; none outside `membership`.
            hyperparameters: Values of each group, checked.
            positions: Where the elements of each sparse slice are.
        """
        positions = positions or {}
        sparse = frozenset(
            each
            for each in positions
            if self._is_applied_sparse(hyperparameters[self._group_of(each)])
        )
        wanted = (presence, tuple(hyperparameters), sparse)
        if wanted != self._planned_for:
            self._plan(presence, hyperparameters, sparse)
            self._planned_for = wanted
        try:
            self._give(gradient, positions, sparse)
            with torch.no_grad():
                self._step(self._torch)
        finally:
            for run in self._present_runs:
                run.parameter.grad = None
        for run in self._present_runs:
            run.step_count += 1

    def _give(
        self, gradient: torch.Tensor, positions: Positions, sparse: frozenset[int]
    ) -> None:
        """Hands each present run its part of the gradient."""
        position = 0
        for run in self._present_runs:
            places = [
                positions.get(each)
                for each in (range(run.first, run.stop) if positions else ())
            ]
            following = position + run.parameter.numel()
            part = gradient[position:following]
            if any(each is not None for each in places):
                pieces = self._chunk.slices[run.first : run.stop]
                part = sparse_vector(pieces, places, gradient[position:])
                following = position + part._nnz()
                if run.first in sparse:
                    self._bring_to_origin(run)
                else:
                    part = part.to_dense()
            run.parameter.grad = part
            position = following

    def _bring_to_origin(self, run: _Run) -> None:
        """Sees to it that torch may add sparse gradients to what a run holds."""
        assert not run.parameter.storage_offset(), "runs are made so"
        state = self._torch.state.get(run.parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                state[key] = at_origin(value)

    def _group_of(self, slice_position: int) -> int:
        group = self._groups[slice_position]
        assert group is not None, "only slices of the optimizer come"
        return group

    def _is_applied_sparse(self, values: tuple[float, ...]) -> bool:
        """Whether torch gets the sparse gradient of a slice as such.

        Momentum moves every element that ever had a gradient, so that torch's sparse
        buffer of it grows to the size of a dense one; zeros give the same numbers. With
        a weight decay torch refuses sparse gradients. Workers do so before they send
        one, but the values of another worker may be the ones that count.
        """
        if SUPPORTED[self.spec.class_name].sparse is SparseGradients.REFUSED:
            return False
        named = dict(zip(self.spec.hyperparameter_names, values, strict=True))
        return not any(named.get(each) for each in ("momentum", "weight_decay"))

    def _first_runs(self) -> list[_Run]:
        """Every maximal sequence of slices that the optimizer has."""
        sizes = [piece.element_count for piece in self._chunk.slices]
        starts = [0, *accumulate(sizes)]
        runs: list[_Run] = []
        places = range(len(sizes))
        for is_stateful, group in groupby(places, self._is_stateful.__getitem__):
            if is_stateful:
                positions = list(group)
                first, stop = positions[0], positions[-1] + 1
                values = at_origin(self._values[starts[first] : starts[stop]])
                runs.append(_Run(first, stop, starts[first], values))
        return runs

    def _plan(
        self,
        presence: tuple[bool, ...],
        hyperparameters: Sequence[tuple[float, ...]],
        sparse: frozenset[int],
    ) -> None:
        """Splits runs that are no longer treated alike and groups them for torch."""
        treatment = [
            (hyperparameters[group], position in sparse)
            if present and group is not None
            else None
            for position, (present, group) in enumerate(
                zip(presence, self._groups, strict=True)
            )
        ]
        self._runs = [
            piece for run in self._runs for piece in self._split(run, treatment)
        ]
        self._present_runs = []
        grouped: dict[tuple[Treatment, bool], list[torch.Tensor]] = {}
        for run in self._runs:
            treated = treatment[run.first]
            if treated is None:
                continue
            self._present_runs.append(run)
            # torch's fused SGD takes the first update of a parameter and a later one
            # only in different groups.
            is_fresh = not self._torch.state.get(run.parameter)
            grouped.setdefault((treated, is_fresh), []).append(run.parameter)
        self._torch.param_groups[:] = [
            {**self._group_values(*treated), "params": parameters}
            for (treated, _), parameters in grouped.items()
        ]

    def _group_values(
        self, values: tuple[float, ...], is_sparse: bool
    ) -> dict[str, Any]:
        given = unflatten_group(
            self.spec.class_name, self.spec.hyperparameter_names, values
        )
        # No fused kernel of torch takes sparse gradients.
        switches = {"fused": False, "foreach": False} if is_sparse else {}
        return {**self._torch.defaults, **given, **switches}

    def _split(self, run: _Run, treatment: Sequence[Treatment | None]) -> list[_Run]:
        edges = [
            position
            for position in range(run.first + 1, run.stop)
            if treatment[position] != treatment[position - 1]
        ]
        if not edges:
            return [run]
        state = self._torch.state.pop(run.parameter, None)
        pieces: list[_Run] = []
        start = run.start
        for first, stop in pairwise([run.first, *edges, run.stop]):
            count = sum(each.element_count for each in self._chunk.slices[first:stop])
            parameter = at_origin(self._values[start : start + count])
            if state:
                offset = start - run.start
                self._torch.state[parameter] = {
                    key: part_of(value, offset, count)
                    if isinstance(value, torch.Tensor)
                    else value
                    for key, value in state.items()
                }
            pieces.append(_Run(first, stop, start, parameter, run.step_count))
            start += count
        return pieces


def sparse_vector(
    pieces: Sequence[Slice],
    places: Sequence[torch.Tensor | None],
    gradient: torch.Tensor,
) -> torch.Tensor:
    """The gradient of neighbouring slices, coalesced, sharing memory with `gradient`.

    Args:
        pieces: The slices.
        places: Where the elements of each are in it, ascending; None for all of it.
        gradient: Begins with these elements, 1-D; what follows is left.
    """
    checks = torch.sparse.check_sparse_tensor_invariants
    if not checks.is_enabled():
        # As it is; but torch warns of it until somebody has said so. The positions come
        # from rows that were checked, and torch's optimizers make no others.
        checks.disable()
    indices = torch.cat(list(_shifted(pieces, places)))
    return torch.sparse_coo_tensor(
        indices[None],
        gradient[: len(indices)],
        (sum(piece.element_count for piece in pieces),),
        is_coalesced=True,
        check_invariants=False,
    )


def at_origin(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, sharing memory, as a tensor with storage offset 0.

    torch (2.13 and before) adds a coalesced sparse vector to a dense one on the CPU at
    twice the storage offset of that: into the memory of others, or into nobody's.

    Args:
        tensor: 1-D and contiguous, on the CPU.
    """
    if not tensor.storage_offset():
        return tensor
    return torch.from_numpy(tensor.view(torch.uint8).numpy()).view(tensor.dtype)


def _shifted(
    pieces: Sequence[Slice], places: Sequence[torch.Tensor | None]
) -> Iterator[torch.Tensor]:
    start = 0
    for piece, where in zip(pieces, places, strict=True):
        yield (torch.arange(piece.element_count) if where is None else where) + start
        start += piece.element_count
