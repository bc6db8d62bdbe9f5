"""Which buffers of a model are kept equal, and by whose values: what the user chose.

Shards know nothing of it, see `pswire/v1/push.proto`: workers may differ.
"""

import logging
from collections.abc import Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from typing import Final

from torch.nn.modules.batchnorm import _NormBase

from pswire.schema import EntryKind, SchemaEntry
from psworker.errors import ConfigurationError
from psworker.optim.model_schema import BoundSchema

logger: Final = logging.getLogger("psworker")

_STATISTICS: Final = ("running_mean", "running_var")

_SHOWN_COUNT: Final = 8


class BufferPolicy(Enum):
    """What becomes of a buffer that differs between workers."""

    MEAN = "mean"
    LEADER = "leader"
    LOCAL = "local"


BufferChoice = str | Mapping[str, str] | None
"""A policy for all buffers, or for those whose name a pattern fits."""


def choose_policies(
    bound: BoundSchema, choice: BufferChoice
) -> dict[int, BufferPolicy]:
    """The policy of every buffer, by its entry in the schema.

    The first pattern that fits counts. Buffers that none fits have their default:
    `mean` for the running statistics of batch norm, `leader` for the rest.

    Raises:
        ConfigurationError: A policy is none, or a pattern fits no buffer.
    """
    chosen = read_choice(choice)
    policies = _defaults(bound)
    if isinstance(chosen, BufferPolicy):
        return dict.fromkeys(policies, chosen)
    has_several = len(bound.models) > 1
    names = {
        index: tuple(_names(bound.schema.entries[index], has_several))
        for index in policies
    }
    # The first pattern that fits is the last one to write.
    for pattern, policy in reversed(chosen.items()):
        fitting = [
            index
            for index, known in names.items()
            if any(fnmatchcase(name, pattern) for name in known)
        ]
        if not fitting:
            raise ConfigurationError(_unknown_text(pattern, list(names.values())))
        policies.update(dict.fromkeys(fitting, policy))
    return policies


def read_choice(choice: BufferChoice) -> BufferPolicy | dict[str, BufferPolicy]:
    """What the user named, without a look at any model.

    Raises:
        ConfigurationError: A policy is none.
    """
    if choice is None:
        return {}
    if isinstance(choice, str):
        return _policy(choice, "buffers")
    if not isinstance(choice, Mapping):
        raise ConfigurationError(
            "buffers takes a policy or a dict of them by name, not "
            f"{type(choice).__name__}, such as buffers={{'*running_*': 'mean'}}"
        )
    for pattern in choice:
        if not isinstance(pattern, str):
            raise ConfigurationError(
                f"buffers[{pattern!r}] is no pattern of names but of type "
                f"{type(pattern).__name__}: give names as in state_dict(), such as "
                "buffers={'*running_*': 'mean'}"
            )
    return {
        pattern: _policy(value, f"buffers[{pattern!r}]")
        for pattern, value in choice.items()
    }


def warn_of_defaults(policies: Mapping[int, BufferPolicy]) -> None:
    """Says what is done where a model has batch norm and nobody chose."""
    mean_count = sum(each is BufferPolicy.MEAN for each in policies.values())
    if not mean_count:
        return
    other_count = len(policies) - mean_count
    others = f"; {other_count} other buffers are the leader's" if other_count else ""
    logger.warning(
        "the model has batch norm, whose running statistics come out different on "
        "every worker: at every step all workers take the mean of them (%d buffers)%s. "
        "To choose, and to silence this: prepare(..., buffers='mean'), 'leader' (those "
        "of the worker of the lowest rank) or 'local' (every worker its own), or by "
        "name, as in buffers={'*running_*': 'mean', '*': 'leader'}",
        mean_count,
        others,
    )


def _defaults(bound: BoundSchema) -> dict[int, BufferPolicy]:
    statistics = {
        id(module._buffers.get(name))
        for model in bound.models.values()
        for module in model.modules()
        if isinstance(module, _NormBase)
        for name in _STATISTICS
    }
    return {
        index: BufferPolicy.MEAN
        if entry.element_type.is_floating and id(tensor) in statistics
        else BufferPolicy.LEADER
        for index, (entry, tensor) in enumerate(
            zip(bound.schema.entries, bound.tensors, strict=True)
        )
        if entry.kind is EntryKind.BUFFER
    }


def _names(entry: SchemaEntry, has_several: bool) -> Iterator[str]:
    for name in (entry.name, *entry.tied_names):
        yield name
        if has_several:
            yield f"{entry.model}.{name}"


def _policy(value: object, where: str) -> BufferPolicy:
    try:
        return BufferPolicy(value)
    except ValueError:
        raise ConfigurationError(
            f"{where} is {value!r}, which is no policy: it is 'mean' (the mean over "
            "the workers), 'leader' (the value of the worker of the lowest rank) or "
            "'local' (every worker keeps its own)"
        ) from None


def _unknown_text(pattern: str, known: list[tuple[str, ...]]) -> str:
    text = f"buffers[{pattern!r}] fits no buffer of state_dict()"
    if not known:
        return f"{text}: the models have none; leave buffers out"
    shown = ", ".join(repr(names[-1]) for names in known[:_SHOWN_COUNT])
    more = len(known) - _SHOWN_COUNT
    return f"{text}: there are {shown}" + (f" and {more} more" if more > 0 else "")
