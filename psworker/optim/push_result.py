"""What became of a push, over all shards."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pswire.membership import Outcome
from psworker.transport.values import PushReply

_RANKING: Final = (
    Outcome.DROPPED,
    Outcome.SKIPPED,
    Outcome.STAGED,
    Outcome.APPLIED,
    Outcome.DUPLICATE,
)
"""The outcome of a push is the first of these that any shard answers. A shard that
had the push before a resend says `DUPLICATE` where the others say what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """What became of a push.

    Attributes:
        outcome: `applied`, `staged`, `skipped`, `dropped`, `missed` or `duplicate`.
        clock: This worker's clock after it.
        version: Steps of all workers ever that are in the values.
        frontier: Smallest clock over all workers.
        staleness: Updates that were applied between the values that the gradient came
            from and the push; the largest over all shards, 0 in BSP.
        mode: `bsp`, `ssp`, `asp` or `quorum`: how the values were given.
        duplicate: Whether a shard had it already, and took nothing twice.
        rejoined: Whether the worker was evicted with this push under way and has
            joined again. The outcome is what became of the push even so.
        nonfinite_worker_ids: Workers for whose gradient the clock was skipped.
        grad_norm: With `clip_grad_norm`, the L2 norm of the gradient before it was
            clipped: in BSP of the mean over all workers, in SSP and ASP of this push.
            `None` where nothing was applied of this worker's.
        gradient_factor: What the job has multiplied this worker's gradient by, because
            of `--gradient-norm-max` or `--aggregation`; 0 if it did not count.
        peer_wait_s: How long the push has waited for those of other workers, on the
            shard where that was longest: what a step took without it was its own.
    """

    outcome: str
    clock: int
    version: int
    frontier: int
    staleness: int
    mode: str
    duplicate: bool
    rejoined: bool = False
    nonfinite_worker_ids: tuple[str, ...] = ()
    grad_norm: float | None = None
    gradient_factor: float = 1.0
    peer_wait_s: float = 0.0

    @property
    def dropped(self) -> bool:
        """Whether the gradient was thrown away."""
        return self.outcome == "dropped"

    @property
    def missed(self) -> bool:
        """Whether its clock closed without it, so that a strategy sends it later."""
        return self.outcome == "missed"

    @property
    def skipped(self) -> bool:
        """Whether nobody's gradient was applied, as one was not finite."""
        return self.outcome == "skipped"


def worst_outcome(outcomes: Collection[Outcome]) -> str:
    """What became of a push, from what each shard says of it."""
    return next(each for each in _RANKING if each in outcomes).name.lower()


def combine(replies: Sequence[PushReply]) -> PushResult:
    """One result from the answers of all shards to a push or a pull."""
    outcomes = {reply.outcome for reply in replies}
    nonfinite = {name for reply in replies for name in reply.nonfinite_worker_ids}
    norms = (reply.grad_norm for reply in replies if reply.grad_norm is not None)
    return PushResult(
        outcome=worst_outcome(outcomes),
        clock=min(reply.clock for reply in replies),
        version=min(reply.version for reply in replies),
        frontier=min(reply.frontier for reply in replies),
        staleness=max(reply.staleness for reply in replies),
        mode=max(replies, key=lambda reply: reply.generation).mode.label,
        duplicate=Outcome.DUPLICATE in outcomes,
        nonfinite_worker_ids=tuple(sorted(nonfinite)),
        grad_norm=next(norms, None),
        gradient_factor=min(reply.gradient_factor for reply in replies),
        peer_wait_s=max(reply.peer_wait_s for reply in replies),
    )
