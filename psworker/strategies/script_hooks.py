"""The hooks on a script's own optimizers and models: its steps are local ones."""

import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from psworker.data.batch_tensors import ModelHook
from psworker.strategies.engine import Engine

_is_compiling = torch.compiler.is_compiling

_hooks: Final[WeakKeyDictionary[Optimizer | nn.Module, tuple[RemovableHandle, ...]]] = (
    WeakKeyDictionary()
)
"""On each inner optimizer, and model, those of the newest engine: they refuse steps
once it is closed, until the optimizer is prepared again."""


def hook_script(engine: Engine) -> None:
    """Calls an engine at each step from now on, and before its models compute."""
    for optimizer in engine.optimizers:
        _replace_hooks(
            optimizer,
            optimizer.register_step_pre_hook(partial(_before_step, engine)),
            optimizer.register_step_post_hook(partial(_after_step, engine)),
        )
    for model in engine.models:
        _replace_hooks(model, model.register_forward_pre_hook(_BeforeForward(engine)))


def _replace_hooks(of: Optimizer | nn.Module, *handles: RemovableHandle) -> None:
    """Removes those of a connection before."""
    for handle in _hooks.pop(of, ()):
        handle.remove()
    _hooks[of] = handles


def _before_step(
    engine: Engine, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    change = engine.before_step(optimizer)
    if change is None:
        return None
    own, *given = args  # the optimizer, and what its step was called with
    closure = given[0] if given else kwargs.get("closure")
    if closure is None:
        change()
        return None
    followed = _followed(closure, change)
    if given:
        return (own, followed, *given[1:]), kwargs
    return args, {**kwargs, "closure": followed}


def _followed(
    closure: Callable[[], Any], change: Callable[[], None]
) -> Callable[[], Any]:
    """A closure whose gradients are changed once it has computed them."""

    @wraps(closure)
    def followed() -> Any:  # noqa: ANN401, as the script's
        loss = closure()
        change()
        return loss

    return followed


def _after_step(
    engine: Engine, optimizer: Optimizer, args: object, kwargs: object
) -> None:
    engine.after_step(optimizer)


class _BeforeForward(ModelHook):
    """A forward pre-hook, of a model that must not keep the engine alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, model: nn.Module, _: object) -> None:
        """A model is called."""
        if _is_compiling():
            return
        if (engine := self._engine()) is not None:
            engine.before_forward(model)
