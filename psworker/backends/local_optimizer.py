"""Steps of an optimizer that runs in this process, counted as a job would."""

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, Final

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from psworker.data.batch_tensors import watch_calls
from psworker.data.local_draws import LocalDraws
from psworker.errors import refuse_closed
from psworker.optim.gradients import (
    SpentGradients,
    check_weight,
    collect_gradients,
    stored_elements,
)
from psworker.optim.optimizer_class import WRAPS
from psworker.optim.push_result import PushResult
from psworker.refusals import at_entrance

_WRAPPED_BY_SCHEDULER: Final = "_wrapped_by_lr_sched"
_STEP_WAS_CALLED: Final = "_opt_called"


class LocalSteps:
    """Counts the steps of all optimizers of a process.

    Attributes:
        is_closed: Whether further steps are refused.
        clip_grad_norm: Norm that gradients are clipped to, `None` for no clipping.
        last_push: The newest step, `None` before the first.
        draws: What was drawn from loaders; each step takes what is behind it.
    """

    def __init__(self, mode: str) -> None:
        self.draws = LocalDraws()
        self._mode = mode
        self.is_closed = False
        self.clip_grad_norm: float | None = None
        self.last_push: PushResult | None = None
        self._grad_norm: float | None = None
        self._models: list[nn.Module] = []
        self._parameters: list[torch.Tensor] = []
        self._looked = SpentGradients(0)

    @property
    def clock(self) -> int:
        """Steps that were taken."""
        return self.last_push.clock if self.last_push else 0

    def refuse_closed(self) -> None:
        """Checks that the connection is open.

        Raises:
            ClosedError: It is not.
        """
        refuse_closed(is_closed=self.is_closed)

    def clip(self, optimizer: Optimizer) -> None:
        """Clips the gradients of an optimizer, as a job would."""
        if self.clip_grad_norm is None:
            return
        groups = optimizer.param_groups
        held = [
            _clippable(parameter) for group in groups for parameter in group["params"]
        ]
        # A loss scaler leaves the scale in for optimizers that take it out.
        scale = getattr(optimizer, "grad_scale", None)
        factor = 1.0 if scale is None else float(scale)
        norm = clip_grad_norm_(held, self.clip_grad_norm * factor)
        self._grad_norm = float(norm) / factor

    def watch(
        self,
        models: Iterable[nn.Module],
        parameters: Sequence[torch.Tensor],
        *,
        optimizer_count: int,
    ) -> None:
        """From now on tells what a step is of from the calls of these models.

        Args:
            models: All that are prepared.
            parameters: All that the optimizers have.
            optimizer_count: Optimizers that step, the first time that this is called.
        """
        is_first = not self._models
        fresh = [each for each in models if all(each is not m for m in self._models)]
        self._models += fresh
        self._parameters[:] = parameters
        self._looked = SpentGradients(len(parameters))
        if is_first:
            self.draws.pending.watch(
                lambda: self._looked.differ_from(self._parameters),
                parameters=self._parameters,
                optimizer_count=optimizer_count,
            )
        watch_calls(fresh, self.draws.pending)

    def note_zeroed(self) -> None:
        """What was behind gradients that are gone is behind no step."""
        if self.draws.pending.has_trained and not SpentGradients(
            len(self._parameters)
        ).has_others(self._parameters):
            self.draws.pending.throw_away()

    def note(self) -> None:
        """Counts one more."""
        self.draws.note_step()
        clock = self.clock + 1
        self.last_push = PushResult(
            outcome="applied",
            clock=clock,
            version=clock,
            frontier=clock,
            staleness=0,
            mode=self._mode,
            duplicate=False,
            grad_norm=self._grad_norm,
        )
        self._grad_norm = None


def _clippable(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient torch can clip: of a sparse one, its elements."""
    (gradient,) = collect_gradients([parameter])
    if gradient is None or not gradient.is_sparse:
        return parameter
    elements = stored_elements(gradient)
    holder = torch.empty_like(elements)
    holder.grad = elements
    return holder


def attach(optimizer: Optimizer, steps: LocalSteps) -> None:
    """Makes `optimizer.step()` take `weight=` and count in `steps`.

    The optimizer keeps its class and its arithmetic. A weight changes nothing, since
    nobody else's gradient comes in, but for 0: such a step counts for nothing.
    """
    inner: Callable[..., Any] = optimizer.step

    @at_entrance
    def step(
        self: Optimizer,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float | None = None,
        **others: Any,  # noqa: ANN401, of the user's own class
    ) -> Any:  # noqa: ANN401, what the user's own returns
        steps.refuse_closed()
        check_weight(weight)
        setattr(self, _STEP_WAS_CALLED, True)
        loss = None
        if weight != 0 and closure is None:
            steps.clip(self)
            loss = inner(**others)
        elif weight != 0 and closure is not None:
            loss = inner(_clipping(self, closure, steps), **others)
        steps.note()
        return loss

    # A scheduler that was built before has wrapped the inner one. One that comes later
    # wraps this one.
    if hasattr(inner, _WRAPPED_BY_SCHEDULER):
        setattr(step, _WRAPPED_BY_SCHEDULER, True)
    setattr(step, WRAPS, inner)  # a job may be given it later
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    inner_zero_grad: Callable[..., None] = optimizer.zero_grad

    @_disable_dynamo  # as torch does
    def zero_grad(self: Optimizer, *args: Any, **others: Any) -> None:  # noqa: ANN401
        inner_zero_grad(*args, **others)
        steps.note_zeroed()

    setattr(zero_grad, WRAPS, inner_zero_grad)
    optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]


def _clipping(
    optimizer: Optimizer, closure: Callable[[], Any], steps: LocalSteps
) -> Callable[[], Any]:
    """A closure that also clips the gradients it makes."""

    def call() -> Any:  # noqa: ANN401, the loss
        loss = closure()
        steps.clip(optimizer)
        return loss

    return call
