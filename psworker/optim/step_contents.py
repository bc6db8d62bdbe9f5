"""What a step of an optimizer is, and what its push carries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pswire.leased_data import DataRange
from pswire.schema import OptimizerSpec
from psworker.optim.optimizer_state import States
from psworker.transport.values import DrawnData, PushTrailer

Groups = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class StateLoad:
    """State that shards load into an optimizer, with a push.

    Attributes:
        states: Of its parameters.
        on_loaded: Called once shards have taken it, by the push that carried it. A call
            of `step` may only end an earlier push, which did not.
    """

    states: States
    on_loaded: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPush:
    """What a push has that ends a round of local steps.

    Attributes:
        drawn: The data behind it.
        clock: The clock that it is meant for.
        rejoin_count: How often the worker had joined again when it was made. If it has
            since, or if the push would be of another clock, as after a change of the
            mode, nothing is pushed.
        is_beside: Whether it is made beside the script, which takes further steps.
        slack_ms: How long the script can go on without the answer; None if it is not
            said. Mode quorum holds no clock open for longer.
        is_last: Whether there is no data for another one. Mode quorum waits for it.
    """

    drawn: DrawnData
    clock: int
    rejoin_count: int
    is_beside: bool = False
    slack_ms: int | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """A step of an optimizer, as its script has it.

    Attributes:
        spec: The optimizer, as it was declared last.
        groups: Current hyperparameters of its groups.
        spec_digest: Of its declaration, empty for the first.
        load: State that replaces its own first.
        scheduler_steps: Steps of its schedulers.
        weight: Samples behind the gradient, `None` for those drawn since the last one.
        is_finite: Whether a loss scaler found the gradient finite.
        scale: Loss scale that the gradient still carries.
        is_awaited: Whether the script needs the result before it goes on.
        averaged_over: Processes over which a gradient that is to be a sum was averaged.
        of_round: Of a strategy; `None` for a step on what was drawn since the last one.
    """

    spec: OptimizerSpec
    groups: Groups
    spec_digest: str = ""
    load: StateLoad | None = None
    scheduler_steps: tuple[int, ...] = ()
    weight: float | None = None
    is_finite: bool = True
    scale: torch.Tensor | None = None
    is_awaited: bool = False
    averaged_over: int = 1
    of_round: RoundPush | None = None


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
        is_of_round: Whether a strategy has made it, which keeps what a push is of that
            comes too late in mode quorum. Others are sent again for the next clock.
    """

    optimizer: str
    tensors: Sequence[torch.Tensor | None]
    trailer: PushTrailer
    value_entries: bytes = b""
    ranges: tuple[DataRange, ...] = ()
    is_discarded: bool = False
    on_loaded: Callable[[], None] | None = None
    is_of_round: bool = False
