"""Which optimizers a job may use, and how their hyperparameters travel.

Pure: no torch, so that a worker's command line stays quick and the two sides share
one table. A hyperparameter travels as one float: a pair such as Adam's betas is two
(`betas.0`, `betas.1`), a boolean is 0 or 1. Switches that choose an implementation
(`foreach`, `fused`, `capturable`, `differentiable`) never travel: the shard chooses
its own.

Every optimizer here is elementwise: an element's update depends on its own gradient,
state and hyperparameters only, so that a slice is updated as the whole tensor is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from pswire.reasons import ErrorReason, Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameter:
    """One value of a parameter group.

    Attributes:
        name: Key in the group; `betas.0` is the first value under `betas`.
        is_bool: Whether it is a switch, 0 or 1.
        minimum: Smallest value allowed.
        maximum: Largest value allowed.
        below: Values must be smaller than this.
        neutral: Value a torch without this hyperparameter acts by; `None` if every
            torch has it.
        fixed_bool: Whether it may not turn from false (or 0) to true (or more) or
            back, since torch makes the state behind it only at the first step.
        from_defaults: Whether torch reads it from the optimizer's `defaults`, so that
            a value in a group has no effect.
        is_whole: Whether it is a whole number.
    """

    name: str
    is_bool: bool = False
    minimum: float = 0.0
    maximum: float = math.inf
    below: float = math.inf
    neutral: float | None = None
    fixed_bool: bool = False
    from_defaults: bool = False
    is_whole: bool = False


class SparseGradients(Enum):
    """Whether torch's class takes a sparse gradient."""

    REFUSED = "refused"
    TAKEN = "taken"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class OptimizerTraits:
    """What both sides know of an optimizer class.

    Attributes:
        hyperparameters: In the order of the wire.
        slot_count: Values that it keeps of each element, without those of
            `OPTIONAL_SLOTS`.
        sparse: Whether it takes sparse gradients; none with a weight decay.
    """

    hyperparameters: tuple[Hyperparameter, ...]
    slot_count: int
    sparse: SparseGradients = SparseGradients.REFUSED

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order of the wire, for `OptimizerSpec.hyperparameter_names`."""
        return tuple(each.name for each in self.hyperparameters)


def _switch(name: str, **traits: Any) -> Hyperparameter:  # noqa: ANN401
    return Hyperparameter(name=name, is_bool=True, **traits)


_LR: Final = Hyperparameter(name="lr")
_EPS: Final = Hyperparameter(name="eps")
_WEIGHT_DECAY: Final = Hyperparameter(name="weight_decay")
_MAXIMIZE: Final = _switch("maximize", neutral=0.0)
_DECOUPLED: Final = _switch("decoupled_weight_decay", neutral=0.0)
_BETAS: Final = (
    Hyperparameter(name="betas.0", below=1.0),
    Hyperparameter(name="betas.1", below=1.0),
)
_ADAM: Final = (
    _LR,
    *_BETAS,
    _EPS,
    _WEIGHT_DECAY,
    _switch("amsgrad", fixed_bool=True),
    _MAXIMIZE,
)

SUPPORTED: Final[Mapping[str, OptimizerTraits]] = MappingProxyType(
    {
        "SGD": OptimizerTraits(
            (
                _LR,
                Hyperparameter(name="momentum"),
                Hyperparameter(name="dampening", minimum=-math.inf),
                _WEIGHT_DECAY,
                _switch("nesterov"),
                _MAXIMIZE,
            ),
            0,
            SparseGradients.TAKEN,
        ),
        "Adam": OptimizerTraits((*_ADAM, _DECOUPLED), 2),
        "AdamW": OptimizerTraits(_ADAM, 2),
        "Adagrad": OptimizerTraits(
            (
                _LR,
                Hyperparameter(name="lr_decay"),
                _WEIGHT_DECAY,
                Hyperparameter(name="initial_accumulator_value", from_defaults=True),
                _EPS,
                _MAXIMIZE,
            ),
            1,
            SparseGradients.TAKEN,
        ),
        "SparseAdam": OptimizerTraits(
            (_LR, *_BETAS, _EPS, _MAXIMIZE), 2, SparseGradients.REQUIRED
        ),
        "RMSprop": OptimizerTraits(
            (
                _LR,
                Hyperparameter(name="alpha"),
                _EPS,
                _WEIGHT_DECAY,
                Hyperparameter(name="momentum", fixed_bool=True),
                _switch("centered", fixed_bool=True),
                _MAXIMIZE,
            ),
            1,
        ),
        "Adamax": OptimizerTraits((_LR, *_BETAS, _EPS, _WEIGHT_DECAY, _MAXIMIZE), 2),
        "NAdam": OptimizerTraits(
            (
                _LR,
                *_BETAS,
                _EPS,
                _WEIGHT_DECAY,
                Hyperparameter(name="momentum_decay"),
                _DECOUPLED,
                _MAXIMIZE,
            ),
            2,
        ),
        "RAdam": OptimizerTraits(
            (_LR, *_BETAS, _EPS, _WEIGHT_DECAY, _DECOUPLED, _MAXIMIZE), 2
        ),
        "Adadelta": OptimizerTraits(
            (
                _LR,
                Hyperparameter(name="rho", maximum=1.0),
                _EPS,
                _WEIGHT_DECAY,
                _MAXIMIZE,
            ),
            2,
        ),
        "DelayedNesterov": OptimizerTraits(
            (
                _LR,
                Hyperparameter(name="momentum", fixed_bool=True),
                Hyperparameter(name="buffer_size", minimum=1.0, is_whole=True),
                Hyperparameter(name="activation", maximum=1.0),
            ),
            1,
        ),
    }
)
"""The allow-list: class in `torch.optim`, or in `pswire.optimizer_classes.OWN`, to its
traits."""

OPTIONAL_SLOTS: Final = frozenset({"amsgrad", "centered", "momentum"})
"""Hyperparameters that have an optimizer keep one value more of each element, if they
are not 0."""


def slot_count(class_name: str, names: Sequence[str], values: Sequence[float]) -> int:
    """Values that a supported optimizer keeps of each element of a group."""
    optional = sum(
        name in OPTIONAL_SLOTS and value != 0
        for name, value in zip(names, values, strict=True)
    )
    return SUPPORTED[class_name].slot_count + optional


_UNSUPPORTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Muon": "it needs whole matrices, and a shard holds slices",
        "Adafactor": "it needs whole matrices, and a shard holds slices",
        "LBFGS": "it needs all parameters at once and calls the loss again",
        "ASGD": "it keeps an average that this release does not offer to workers",
        "Rprop": "it is made for whole data sets, not for batches",
    }
)


def check_supported(class_name: str, module: str = "torch.optim") -> None:
    """Checks that shards can run an optimizer.

    Args:
        class_name: Name of the class.
        module: Where the class is defined. A class of the same name from elsewhere
            need not have the same arithmetic.

    Raises:
        Refusal: `OPTIMIZER_UNSUPPORTED`, with the reason and what is supported.
    """
    is_torch = module == "torch.optim" or module.startswith("torch.optim.")
    if is_torch and class_name in SUPPORTED:
        return
    if not is_torch:
        class_name = f"{module}.{class_name}"
        why = "shards run classes of torch.optim only, and psworker.DelayedNesterov"
    else:
        why = _UNSUPPORTED.get(class_name, "no such optimizer is known")
    raise Refusal(
        ErrorReason.OPTIMIZER_UNSUPPORTED,
        f"optimizer {class_name[:128]!r} can't run on shards: {why}; supported are "
        + ", ".join(SUPPORTED),
        class_name=class_name[:128],
        supported=", ".join(SUPPORTED),
    )


def flatten_group(
    class_name: str,
    group: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> tuple[float, ...]:
    """Reads a parameter group's hyperparameters in the order of the wire.

    Args:
        class_name: One of `SUPPORTED`.
        group: A group of the optimizer's `param_groups`. Values may be numbers,
            booleans or tensors of one element.
        defaults: The optimizer's `defaults`, for what torch reads from there, and for
            what a group must have.

    Raises:
        Refusal: `HYPERPARAMETER_INVALID` for a value that is no number, or that is
            missing though every torch has it.
    """
    values = []
    for each in SUPPORTED[class_name].hyperparameters:
        source = defaults if each.from_defaults and defaults is not None else group
        neutral = each.neutral if each.name not in (defaults or ()) else None
        values.append(_read(class_name, each, source, neutral))
    return tuple(values)


def _read(
    class_name: str,
    each: Hyperparameter,
    source: Mapping[str, Any],
    neutral: float | None,
) -> float:
    key, _, position = each.name.partition(".")
    if key not in source and neutral is not None:
        return neutral
    try:
        value = source[key]
        if isinstance(value, str):
            raise TypeError("torch does not read numbers from text")
        return float(value[int(position)] if position else value)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise Refusal(
            ErrorReason.HYPERPARAMETER_INVALID,
            f"{class_name}'s {each.name} is not a number: "
            f"{str(source.get(key, 'missing'))[:64]}",
            hyperparameter=each.name,
        ) from error


def unflatten_group(
    class_name: str, names: Sequence[str], values: Sequence[float]
) -> dict[str, Any]:
    """Turns wire values back into entries of a parameter group."""
    switches = {
        each.name for each in SUPPORTED[class_name].hyperparameters if each.is_bool
    }
    group: dict[str, Any] = {}
    pairs: dict[str, dict[int, float]] = {}
    for name, value in zip(names, values, strict=True):
        key, _, position = name.partition(".")
        if position:
            pairs.setdefault(key, {})[int(position)] = float(value)
        else:
            group[key] = bool(value) if name in switches else float(value)
    for key, parts in pairs.items():
        group[key] = tuple(parts[position] for position in sorted(parts))
    return group


def check_values(
    class_name: str,
    names: Sequence[str],
    values: Sequence[float],
    *,
    declared: Sequence[float] | None = None,
) -> None:
    """Checks the hyperparameters of one group, as they come from a worker.

    Args:
        class_name: One of `SUPPORTED`.
        names: Names in the order of `values`.
        values: Current values.
        declared: Values at `prepare`, against which what may not change is held.

    Raises:
        Refusal: `HYPERPARAMETER_INVALID`, naming the hyperparameter and its value.
    """
    traits = SUPPORTED[class_name]
    if tuple(names) != traits.names or len(values) != len(names):
        raise Refusal(
            ErrorReason.HYPERPARAMETER_INVALID,
            f"{class_name} takes {', '.join(traits.names)}; the group has "
            f"{len(values)} values for {', '.join(names)[:256]}",
        )
    for position, (each, value) in enumerate(
        zip(traits.hyperparameters, values, strict=True)
    ):
        problem = _problem(each, value)
        if problem is None and declared is not None and each.fixed_bool:
            before = declared[position]
            if bool(before) != bool(value):
                problem = (
                    f"was {before:g} at prepare, and torch makes the state that it "
                    "needs at the first step only"
                )
        if problem is not None:
            raise Refusal(
                ErrorReason.HYPERPARAMETER_INVALID,
                f"{class_name}'s {each.name} = {value!r} {problem}",
                hyperparameter=each.name,
                value=value,
            )


def _problem(each: Hyperparameter, value: float) -> str | None:
    if not math.isfinite(value):
        return "is not finite"
    if each.is_bool and value not in (0.0, 1.0):
        return "is neither 0 nor 1"
    if value < each.minimum:
        return f"is less than {each.minimum:g}"
    if value > each.maximum:
        return f"is more than {each.maximum:g}"
    if value >= each.below:
        return f"is not less than {each.below:g}"
    if each.is_whole and value != int(value):
        return "is not a whole number"
    return None
