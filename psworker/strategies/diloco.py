"""DiLoCo: many local steps, and Nesterov's momentum over their mean."""

from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from pswire.number_range import NumberRange
from psworker.errors import refuse_numbers
from psworker.strategies.local_steps import LocalSteps
from psworker.strategies.pace import STEP_COUNT_MAX, Every, Pace
from psworker.strategies.strategy import (
    RATE,
    SHARE,
    FragmentOrder,
    InnerState,
    Tensors,
)


class DiLoCo(LocalSteps):
    """Pushes the difference from the anchor; the shards run Nesterov with the mean.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", arXiv 2311.08105. The defaults are the paper's, whose inner optimizer is
    AdamW and keeps its state. With few local steps a lower `lr` or `momentum` is
    steadier: see docs/strategies.md.
    """

    def __init__(
        self,
        every: Every | Pace = 500,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        inner_state: InnerState = "keep",
    ) -> None:
        """Takes the length of a round, and the outer optimizer.

        Args:
            every: Local steps of a round, as of `LocalSteps`.
            lr: Rate of the outer optimizer.
            momentum: Nesterov's; 0 for none.
            inner_state: What becomes of the inner optimizer's state at each round.

        Raises:
            ConfigurationError: A number is out of its range.
        """
        refuse_numbers(RATE, lr=lr)
        refuse_numbers(SHARE, momentum=momentum)
        outer = partial(
            torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0
        )
        super().__init__(every, outer, inner_state=inner_state)


class StreamingDiLoCo(DiLoCo):
    """Streaming DiLoCo: fragments of the model take turns, beside the local steps.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication",
    arXiv 2501.18512, algorithm 2.

    In each round of `every` local steps each fragment is pushed once, so that the link
    carries a fraction of the model at a time. What comes back is taken `taken_after`
    steps later, and merged with what the worker has trained meanwhile.
    """

    taken_after_min: ClassVar[int] = 0

    def __init__(
        self,
        every: Every | Pace = 100,
        *,
        fragment_count: int = 4,
        fragment_order: FragmentOrder = "strided",
        taken_after: int = 5,
        own_share: float | Literal["trained"] = 0.5,
        lr: float = 0.4,
        momentum: float = 0.9,
        inner_state: InnerState = "keep",
    ) -> None:
        """Takes the paper's numbers; its fragments have three layers each.

        Args:
            every: H, local steps between two pushes of the same fragment, as of
                `LocalSteps`.
            fragment_count: P, parts of about as many elements each.
            fragment_order: Which layers are in one part: neighbours (`sequential`), or
                some from all over the model (`strided`).
            taken_after: tau, local steps from a push to taking what comes back. By
                then the worker waits for it.
            own_share: alpha, the share of its own values that a worker keeps when it
                takes a fragment: 0 for none. With `"trained"` it takes the job's values
                and adds what it has trained since the push, which is not the paper's.
            lr: Learning rate of the outer optimizer.
            momentum: Its momentum.
            inner_state: What becomes of the inner optimizer's state at each round.

        Raises:
            ConfigurationError: A number is out of its range, or the next push would be
                due before the last one is taken.
        """
        super().__init__(every, lr=lr, momentum=momentum, inner_state=inner_state)
        step_count = every if isinstance(every, int) else STEP_COUNT_MAX
        why = f"each fragment is pushed once in the steps of every={every}"
        refuse_numbers(
            NumberRange(1, step_count, why=why), fragment_count=fragment_count
        )
        most, why = step_count // fragment_count, f"{why}, and one at a time"
        refuse_numbers(
            NumberRange(self.taken_after_min, most, why=why), taken_after=taken_after
        )
        self.keeps_trained = own_share == "trained"
        share = 0.0 if own_share == "trained" else own_share
        or_trained = replace(SHARE, why='give one, or "trained"')
        refuse_numbers(or_trained, own_share=share)
        self.fragment_count = fragment_count
        self.fragment_order = fragment_order
        self.taken_after = taken_after
        self.own_share = share

    @override
    def take(self, local: Tensors, anchor: Tensors) -> None:
        torch._foreach_lerp_(list(local), list(anchor), 1 - self.own_share)
