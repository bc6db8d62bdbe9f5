"""What becomes of the state of inner optimizers at each round: kept, reset, averaged.

State that is averaged travels as buffers of a further model of the job, which
snapshots leave out: the shards take the mean of them, as of those of batch norm.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from pswire.reasons import Refusal
from pswire.torch_types import element_type_of
from psworker.errors import UnsupportedError
from psworker.strategies.strategy import InnerState, Tensors


class _Averaged(NamedTuple):
    """A tensor of the state of one parameter, and the buffer that it travels in."""

    optimizer: Optimizer
    parameter: torch.Tensor
    key: str
    buffer: torch.Tensor

    @property
    def own(self) -> torch.Tensor | None:
        """The worker's own, `None` before the first step of the parameter."""
        held: torch.Tensor | None = self.optimizer.state.get(self.parameter, {}).get(
            self.key
        )
        return held


class InnerStates:
    """Those of all inner optimizers of a worker.

    Attributes:
        model: Has what is averaged, `None` if nothing is.
    """

    def __init__(self, kind: InnerState, optimizers: Sequence[Optimizer]) -> None:
        """Finds out what state there will be.

        Args:
            kind: What becomes of it.
            optimizers: The inner ones.

        Raises:
            UnsupportedError: Nothing of it can be averaged, and it is to be.
        """
        self.model: nn.Module | None = None
        self._optimizers = optimizers
        self._resets = kind == "reset"
        self._averaged: list[_Averaged] = []
        if kind == "average":
            self.model = nn.Module()
            for number, optimizer in enumerate(optimizers):
                self._average(number, optimizer)

    def _average(self, number: int, optimizer: Optimizer) -> None:
        """Takes state into the model that has the shape of its parameter."""
        found = len(self._averaged)
        assert self.model is not None, "it was made"
        pairs = zip(_parameters_of(optimizer), _tried(optimizer), strict=True)
        for position, (parameter, state) in enumerate(pairs):
            for key, value in sorted(state.items()):
                if not _is_like(value, parameter):
                    continue
                buffer = torch.zeros_like(value)
                name = f"{number}_{position}_{key}".replace(".", "_")
                self.model.register_buffer(name, buffer)
                self._averaged.append(_Averaged(optimizer, parameter, key, buffer))
        if len(self._averaged) == found:
            raise UnsupportedError(
                f'inner_state="average" takes the mean of state that has the shape of '
                f"its parameter, and {type(optimizer).__name__} has none: leave "
                "inner_state out to keep it in each worker"
            )

    def send(self) -> None:
        """Copies what is averaged to where the push finds it.

        Raises:
            UnsupportedError: It is sparse, as gradients are that it is made of.
        """
        for each in self._averaged:
            if (own := each.own) is not None:
                if own.layout != each.buffer.layout:
                    raise UnsupportedError(
                        f"the {each.key} of a {type(each.optimizer).__name__} is "
                        'sparse, and inner_state="average" takes the mean of dense '
                        "state: leave inner_state out, or sparse gradients, as in "
                        "nn.Embedding(..., sparse=False)"
                    )
                each.buffer.copy_(own)

    def take(self, parameters: Tensors) -> None:
        """A round of these parameters is over: takes the mean, or forgets the state."""
        for each in self._averaged:
            if (own := each.own) is not None:
                own.copy_(each.buffer)
        if self._resets:
            for optimizer in self._optimizers:
                for parameter in parameters:
                    optimizer.state.pop(parameter, None)

    def reset(self) -> None:
        """Forgets all of it: it is of values that the worker has given up."""
        for optimizer in self._optimizers:
            optimizer.state.clear()


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _tried(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The state of each parameter after a first step, which a copy takes.

    Raises:
        UnsupportedError: It takes no step without a closure.
    """
    tried = copy.deepcopy(optimizer)
    parameters = _parameters_of(tried)
    for each in parameters:
        each.grad = torch.zeros_like(each)
    try:
        tried.step()
    except TypeError:
        raise UnsupportedError(
            f'inner_state="average" can\'t find out the state of a '
            f"{type(optimizer).__name__}, which takes no step without a closure: leave "
            "inner_state out to keep it in each worker"
        ) from None
    return [dict(tried.state.get(each, {})) for each in parameters]


def _is_like(value: object, parameter: torch.Tensor) -> bool:
    """Whether this is a tensor of the shape of its parameter that can be averaged."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    try:
        return element_type_of(value.dtype).is_floating
    except Refusal:
        return False
