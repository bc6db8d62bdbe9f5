"""Which class of torch, or of this project, an optimizer is, by what it does.

Shards run these classes alone, so that a step, or what a step calls, must be of them
here too: functions are looked at, not names. Wrappers that torch itself puts around
a step, as schedulers and `torch.compile` do, change nothing.
"""

import inspect
from collections.abc import Iterator
from typing import Final

from torch.optim import Optimizer

from pswire.optimizer_classes import OWN, class_named
from pswire.optimizers import check_supported
from psworker.errors import ConfigurationError, OptimizerUnsupportedError

WRAPS: Final = "_ps_wraps"
"""Attribute of a step of ours: the one that was there before."""

_METHODS: Final = (
    "step",
    "_init_group",
    "zero_grad",
    "add_param_group",
    "state_dict",
    "load_state_dict",
)
"""What a prepared optimizer does by itself, and would not ask the user's for."""

_ATTRIBUTES: Final = ("param_groups", "state", "defaults")
_LAYERS: Final = ("__func__", "_torchdynamo_orig_callable", WRAPS, "__wrapped__")


def class_of(optimizer: Optimizer, label: str) -> str:
    """Name of the class on the allow-list that does all that an optimizer does.

    Its class may be one that is derived from that and sets other defaults, or adds
    methods. Errors call it by `label`.

    Raises:
        Refusal: `OPTIMIZER_UNSUPPORTED`: there is none that shards can run.
        OptimizerUnsupportedError: Its class, or a patch of torch's, does something by
            itself.
        ConfigurationError: Something was set on the object.
    """
    own = type(optimizer)
    base = next((each for each in own.__mro__ if _is_known(each)), None)
    if base is None or base is Optimizer:
        check_supported(own.__name__, _foreign_module(own))
    assert base is not None, "a class of no base is refused"
    check_supported(base.__name__)
    for kind in own.__mro__[: own.__mro__.index(Optimizer)]:
        if found := [name for name in _METHODS if _is_own(vars(kind).get(name))]:
            raise _class_refusal(kind, base, found, label)
        if found := [name for name in _ATTRIBUTES if name in vars(kind)]:
            raise _class_refusal(kind, base, found, label)
    for name in _METHODS:
        if _is_own(vars(optimizer).get(name)):
            raise ConfigurationError(
                f"the script has set {name} on {label}, a {_named(base)}, "
                "to a function of its own, which shards can't run: set it after "
                "prepare(), on the optimizer that prepare() returned, where it works "
                f"around that one's {name}"
            )
    return base.__name__


def _is_known(kind: type) -> bool:
    return class_named(kind.__name__) is kind


def _foreign_module(kind: type) -> str:
    """Where a class is from that only says that it is from torch."""
    is_feigned = kind.__module__.split(".")[0] == "torch"
    return "another module" if is_feigned else kind.__module__


def _named(base: type) -> str:
    return f"{'psworker' if base in OWN.values() else 'torch.optim'}.{base.__name__}"


def _is_own(value: object) -> bool:
    """Whether it is there, and some layer of it is neither torch's nor ours."""
    return value is not None and not all(
        str(getattr(layer, "__globals__", {}).get("__name__", "")).startswith(
            ("torch.", "psworker.", "pswire.")
        )
        for layer in _layers(value)
    )


def _layers(value: object) -> Iterator[object]:
    """Functions around functions, the outermost first; a method is its function."""
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        if not inspect.ismethod(value):
            yield value
        value = next(
            (
                inner
                for name in _LAYERS
                if (inner := getattr(value, name, None)) is not None
            ),
            None,
        )


def _class_refusal(
    kind: type, base: type, names: list[str], label: str
) -> OptimizerUnsupportedError:
    what = " and ".join(names)
    if kind is base:
        text = (
            f"{what} of {_named(base)} was replaced in this process, and shards run "
            f"the class's own: take that back before prepare(), or set {what} "
            f"on the optimizer that prepare() returned for {label}"
        )
    else:
        text = (
            f"{label} is a {kind.__module__}.{kind.__qualname__}, which has {what} of "
            f"its own, and shards run {_named(base)} alone: give "
            "prepare() one of that class, and do what yours adds in the script, "
            "around the step of the optimizer that prepare() returned"
        )
    return OptimizerUnsupportedError(text)
