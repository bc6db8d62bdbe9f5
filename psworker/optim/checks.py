"""What `prepare` refuses before it looks into any object, and in which words."""

import difflib
import sys
from typing import TYPE_CHECKING, Final

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pswire.clipping import is_clip_norm
from psworker.errors import ConfigurationError, UnsupportedError
from psworker.optim.named_objects import OPTIONS, NamedObjects
from psworker.optim.optimizer import PreparedOptimizer

if TYPE_CHECKING:
    from psworker.optim.prepare import PrepareOptions

LOSSES: Final = ("mean", "sum")
"""What a loss may be over the samples of its batch."""


def check_objects(objects: NamedObjects) -> None:
    """Checks that these may be prepared together.

    Raises:
        ConfigurationError: Something is missing, or of a kind that is not taken.
    """
    check_kinds(objects)
    if not all(
        any(isinstance(each, kind) for each in objects.objects)
        for kind in (nn.Module, Optimizer)
    ):
        raise ConfigurationError(
            "prepare() needs at least one model and one optimizer, as in `model, "
            "optimizer, loader = ps.prepare(model, optimizer, loader)`"
        )


def check_kinds(objects: NamedObjects) -> None:
    """Checks that all are of kinds that `prepare` takes, each once.

    Raises:
        ConfigurationError: Something is not.
    """
    seen: set[int] = set()
    for each, name in zip(objects.objects, objects.names, strict=True):
        if isinstance(each, PreparedOptimizer):
            raise ConfigurationError(f"{each.name} was prepared already")
        if not isinstance(
            each, nn.Module | Optimizer | DataLoader | LRScheduler | GradScaler
        ):
            raise ConfigurationError(kinds_text(each, name))
        if id(each) in seen:
            raise ConfigurationError(f"a {type(each).__name__} was given twice")
        seen.add(id(each))


def kinds_text(each: object, name: str) -> str:
    """The refusal of an object of another kind than `prepare` takes.

    `name` is the keyword that it was given by, empty if there was none.
    """
    if not name:
        return (
            f"prepare() does not take a {type(each).__name__}: it takes models "
            "(nn.Module), optimizers (torch.optim), loaders (DataLoader), learning "
            "rate schedulers and gradient scalers (torch.amp.GradScaler)"
        )
    close = difflib.get_close_matches(name, OPTIONS, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return (
        f"{name}={each!r} is no option of prepare(){meant}, which are "
        f"{', '.join(OPTIONS)}, and names nothing that it prepares: a name is given "
        "to a model, an optimizer, a loader, a scheduler or a gradient scaler"
    )


def check_clip_norm(clip_grad_norm: float | None) -> None:
    """Checks that gradients can be clipped to this norm.

    Raises:
        ConfigurationError: It is no number, not finite, or not more than 0.
    """
    if clip_grad_norm is None:
        return
    is_number = isinstance(clip_grad_norm, int | float)
    if isinstance(clip_grad_norm, bool) or not is_number:
        raise ConfigurationError(
            f"clip_grad_norm={clip_grad_norm!r} is not a number: give the largest norm "
            "that a gradient may have, as a float, or leave it out"
        )
    # Of Python's own integers some are more than any float.
    if clip_grad_norm > sys.float_info.max or not is_clip_norm(clip_grad_norm):
        raise ConfigurationError(
            f"clip_grad_norm={clip_grad_norm!r} is no norm to clip to: it must be "
            "finite and more than 0; leave it out for no clipping"
        )


def check_same_clip_norm(clip_grad_norm: float | None, first: float | None) -> None:
    """Checks that a later `prepare` clips as the first one.

    Raises:
        ConfigurationError: It does not.
    """
    if clip_grad_norm not in (None, first):
        raise ConfigurationError(
            f"the job clips as the first prepare() said, clip_grad_norm={first}; leave "
            "it out when prepare() is called again"
        )


def check_loss(loss: str | None, first: str | None = None) -> None:
    """Checks what the loss is said to be over its batch.

    `first` is what the first call of `prepare` was given, if this is a later one.

    Raises:
        ConfigurationError: It is no such word, or another one than the first.
    """
    if loss is None:
        return
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ConfigurationError(
            f'loss={loss!r} is neither "mean" nor "sum": say which of the two the loss '
            "is over its batch, or leave it out for a mean; an object of that name "
            "needs another one"
        )
    if first is not None and loss != first:
        raise ConfigurationError(
            f'the job\'s loss is what the first prepare() said, loss="{first}"; leave '
            "it out when prepare() is called again"
        )


def check_options_with_strategy(options: "PrepareOptions") -> None:
    """Checks that nothing is asked for that makes no sense with local steps.

    Raises:
        UnsupportedError: Something is, with what to do instead.
    """
    for is_given, text in (
        (
            options.overlap,
            "overlap=True sends gradients during backward(), and a strategy pushes "
            "after local steps: leave overlap out; a strategy with taken_after pushes "
            "beside the next steps",
        ),
        (
            options.clip_grad_norm is not None,
            "clip_grad_norm clips what the job applies, which with a strategy is no "
            "gradient: leave it out, and clip before the step with "
            "torch.nn.utils.clip_grad_norm_",
        ),
        (
            options.loss == "sum",
            'loss="sum" adds up the gradients of all workers, and with a strategy each '
            "worker steps by itself: leave it out",
        ),
        (
            options.differential_privacy is not None,
            "differential_privacy makes gradients private that are pushed, and a "
            "strategy pushes what local steps have changed: leave one of them out",
        ),
    ):
        if is_given:
            raise UnsupportedError(text)


def check_called_once(*, is_first: bool) -> None:
    """Checks that `prepare` is called once where there is a strategy.

    Raises:
        ConfigurationError: It was called before.
    """
    if not is_first:
        raise ConfigurationError(
            "prepare() takes a strategy in its first call, and is called once then: "
            "the optimizer is the script's own, and can be replaced only with another "
            "connection"
        )


def check_overlap(overlap: bool) -> None:
    """Checks that overlap is switched on or off.

    Raises:
        ConfigurationError: It is neither.
    """
    if not isinstance(overlap, bool):
        raise ConfigurationError(
            f"overlap={overlap!r} is neither True nor False: give one of them, or "
            "leave it out"
        )
