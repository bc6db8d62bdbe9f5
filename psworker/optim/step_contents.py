"""What the step of an optimizer carries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from pswire.leased_data import DataRange
from psworker.optim.optimizer_state import States
from psworker.transport.values import PushTrailer

Groups = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class PushExtras:
    """What goes with a push of an optimizer beside its gradient.

    Attributes:
        spec_digest: Of the declaration of the optimizer, empty for the first.
        loads: State that shards load into the optimizer first.
        on_loaded: Called once shards have taken that state, by the push that carried
            it. A call of `step` may only end an earlier push, which did not.
        scheduler_steps: Steps of its schedulers.
        is_awaited: Whether the script needs the result before it goes on.
        averaged_over: Processes over which a gradient that is to be a sum was averaged.
    """

    spec_digest: str = ""
    loads: States | None = None
    on_loaded: Callable[[], None] | None = None
    scheduler_steps: tuple[int, ...] = ()
    is_awaited: bool = False
    averaged_over: int = 1


NO_EXTRAS: Final = PushExtras()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContents:
    """All that one push carries.

    Attributes:
        optimizer: Name of the optimizer.
        tensors: The gradient of each entry, or its value, `None` for none.
        value_entries: Bits of the entries that are sent as values.
        trailer: Weight, norm, verdict and what else completes the push.
        ranges: Data behind the gradient; in the trailer too, unless it is discarded.
        is_discarded: Whether the gradient was thrown away here.
        on_loaded: Called once shards have taken the state that goes with it.
    """

    optimizer: str
    tensors: Sequence[torch.Tensor | None]
    trailer: PushTrailer
    value_entries: bytes = b""
    ranges: tuple[DataRange, ...] = ()
    is_discarded: bool = False
    on_loaded: Callable[[], None] | None = None
