"""Decoupled DiLoCo: learners on clocks of their own, merged as they come."""

from typing_extensions import override

from psworker.errors import ConfigurationError
from psworker.strategies.diloco import (
    FRAGMENT_COUNT_DEFAULT,
    OWN_SHARE_DEFAULT,
    STREAMING_EVERY_DEFAULT,
    STREAMING_LR_DEFAULT,
    TAKEN_AFTER_DEFAULT,
    StreamingDiLoCo,
)
from psworker.strategies.pace import Every, Pace
from psworker.strategies.rounds import Progress
from psworker.strategies.strategy import FragmentOrder, InnerState


class DecoupledDiLoCo(StreamingDiLoCo):
    """Streaming DiLoCo of workers that wait for nobody, in mode quorum.

    Source: Decoupled DiLoCo team, "Decoupled DiLoCo for Resilient Distributed
    Pre-training", arXiv 2604.21428.

    A fragment is merged when `--quorum` workers have pushed it, and up to
    `--grace-window` later if no worker would have to wait for that. A worker goes on
    with its local steps meanwhile, however long that takes, and takes what came back
    `taken_after` steps later or at the first step at which it is there. A push that
    comes after the merge is not sent: the worker takes the job's newest values, keeps
    what it has trained, and pushes that later. A worker that is stopped, lost or slow
    halts nobody.

    Each push counts as tokens x (tokens / steps) since the worker's last push of that
    fragment: a worker that is fast, or has large batches, more. See
    `Connection.note_tokens`; where none are noted samples stand for tokens.
    """

    fragments_are_drawn = True
    modes = ("quorum", "bsp", "ssp", "asp")

    def __init__(
        self,
        every: Every | Pace = STREAMING_EVERY_DEFAULT,
        *,
        fragment_count: int = FRAGMENT_COUNT_DEFAULT,
        fragment_order: FragmentOrder = "strided",
        taken_after: int = TAKEN_AFTER_DEFAULT,
        own_share: float = OWN_SHARE_DEFAULT,
        lr: float = STREAMING_LR_DEFAULT,
        momentum: float = 0.9,
        inner_state: InnerState = "keep",
    ) -> None:
        """Takes the numbers of `StreamingDiLoCo`.

        Args:
            every: Local steps between two pushes of the same fragment, of a worker that
                misses none.
            fragment_count: Parts of about as many elements each.
            fragment_order: Which layers are in one part.
            taken_after: Local steps from a push to taking what comes back, at least 1.
            own_share: The share of its own values that a worker keeps when it takes a
                fragment.
            lr: Learning rate of the outer optimizer.
            momentum: Its momentum, Nesterov's.
            inner_state: What becomes of the inner optimizer's state at each round.

        Raises:
            ConfigurationError: A number is out of its range, or `taken_after` is 0:
                each push would wait for a quorum.
        """
        super().__init__(
            every,
            fragment_count=fragment_count,
            fragment_order=fragment_order,
            taken_after=taken_after,
            own_share=own_share,
            lr=lr,
            momentum=momentum,
            inner_state=inner_state,
        )
        if not taken_after:
            raise ConfigurationError(
                "taken_after=0 has each push wait for a quorum, and workers of "
                "DecoupledDiLoCo wait for nobody: give a number of local steps from 1 "
                "on"
            )

    @override
    def weight(self, progress: Progress) -> float:
        work = progress.work
        count = work.token_count or work.sample_count
        return count * count / max(1, work.step_count)
