"""What `prepare` is given when it is called again: other optimizers for its models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from psworker.errors import ConfigurationError
from psworker.optim.buffer_policies import BufferChoice, choose_policies
from psworker.optim.loss_scales import LossScales
from psworker.optim.named_objects import NamedObjects
from psworker.optim.optimizer import PreparedOptimizer
from psworker.optim.prepare import Prepared, kinds_text
from psworker.optim.wrappers import without_wrappers
from psworker.tensors.compression import CompressionChoice, read_compression


@dataclass(frozen=True, slots=True)
class PreparedAgain:
    """What changes.

    Attributes:
        optimizers: New optimizers by the name of the one that each is in place of.
        loaders: The prepared loader of each that was given, by its `id()`.
        schedulers: Learning rate schedulers.
        loss_scales: Of gradient scalers, none if none was given again.
    """

    optimizers: dict[str, Optimizer]
    loaders: dict[int, Any]
    schedulers: tuple[LRScheduler, ...]
    loss_scales: LossScales


def refuse_other_choices(
    given: Prepared, buffers: BufferChoice, compression: CompressionChoice
) -> None:
    """Checks that a second call names no other policies of buffers or compression.

    Raises:
        ConfigurationError: It does, or what it names is none.
    """
    if buffers is not None and choose_policies(given.bound, buffers) != given.buffers:
        raise ConfigurationError(
            "buffers keep the policies of the first prepare(); leave buffers out, or "
            "give the same, when prepare() is called again"
        )
    if compression is not None and (
        str(read_compression(compression)) != str(given.compression)
    ):
        raise ConfigurationError(
            f"the job sends as the first prepare() said, "
            f"{str(given.compression) or 'without compression'}; leave compression "
            "out, or give the same, when prepare() is called again"
        )


def sort_again(
    call: NamedObjects,
    given: Prepared,
    optimizers: Mapping[str, PreparedOptimizer],
    loaders: Mapping[int, Any],
) -> PreparedAgain:
    """Finds what each object is in the job.

    Args:
        call: What was given now.
        given: What was given first.
        optimizers: The job's by name, as prepared last.
        loaders: Prepared loaders by `id()` of what they were made from.

    Raises:
        ConfigurationError: It does not fit what was given first.
    """
    objects = call.objects
    schedulers = tuple(each for each in objects if _is(each, LRScheduler))
    scalers = LossScales(each for each in objects if _is(each, GradScaler))
    found = PreparedAgain({}, {}, schedulers, scalers)
    models = [without_wrappers(each) for each in given.models.values()]
    prepared = list(loaders.values())
    for each, name in zip(objects, call.names, strict=True):
        if _is(each, nn.Module):
            if not any(without_wrappers(each) is model for model in models):
                raise ConfigurationError(
                    "prepare() again takes the models of the first call only: the "
                    "job's shards hold those; connect to another job for another model"
                )
        elif id(each) in loaders or any(each is known for known in prepared):
            found.loaders[id(each)] = loaders.get(id(each), each)
        elif _is(each, DataLoader):
            raise ConfigurationError(
                "prepare() again takes the loaders of the first call only: leave "
                "loaders out, and go on with those that it has returned"
            )
        elif not _is(each, Optimizer | LRScheduler | GradScaler):
            raise ConfigurationError(kinds_text(each, name))
    _match(call, optimizers, found)
    return found


def _match(
    call: NamedObjects,
    optimizers: Mapping[str, PreparedOptimizer],
    found: PreparedAgain,
) -> None:
    """Matches optimizers by name; those without one by their order in the job."""
    named = {name: each for name, each in call.by_name.items() if _is(each, Optimizer)}
    unknown = [name for name in named if name not in optimizers]
    if unknown:
        raise ConfigurationError(
            f"prepare() again takes the names of the first call: {unknown[0]!r} is "
            f"none of the job's optimizers, which are {', '.join(optimizers)}"
        )
    unnamed = [each for each in call.positional if _is(each, Optimizer)]
    left = [name for name in optimizers if name not in named]
    given = [*named.values(), *unnamed]
    # With names those that stay may be left out.
    is_short = len(unnamed) != len(left) and not (named and not unnamed)
    if is_short or len({id(each) for each in given}) < len(given):
        raise ConfigurationError(
            f"prepare() again takes as many optimizers as the job has, which are "
            f"{', '.join(optimizers)}, in the order of the first call: a new one where "
            "one is exchanged, and the prepared one where not; or those that are "
            f"exchanged by name, as in {next(iter(optimizers))}=..."
        )
    pairs = [*named.items(), *zip(left, unnamed, strict=False)]
    for name, each in pairs:
        known = optimizers[name]
        if each is known:
            continue
        if isinstance(each, PreparedOptimizer) or any(
            other.is_of(each) for other in optimizers.values()
        ):
            raise ConfigurationError(
                f"{name} can't be exchanged for an optimizer that was prepared "
                "already; build a new one, or give the one that prepare() returned, "
                "at its place"
            )
        found.optimizers[name] = each


def _is(each: object, kind: Any) -> bool:  # noqa: ANN401, a class or a union of them
    return isinstance(each, kind)
