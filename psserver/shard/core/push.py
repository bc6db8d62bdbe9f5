"""What a push consists of, as a shard's core sees it."""

from dataclasses import dataclass
from typing import NamedTuple

from pswire.leased_data import DataRange
from pswire.membership import Mode, WorkerKey
from pswire.outcome import Outcome


class PushId(NamedTuple):
    """Identity of a push on this shard."""

    worker: WorkerKey
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """What completes a push.

    Attributes:
        optimizer: Name of the optimizer that shall apply it.
        weight: Number of samples behind the gradient; finite, at least 0.
        hyperparameters: For each group of the optimizer, its current values.
        finite: The sender's verdict on its whole gradient.
        loss_scale: Factor the gradient still carries; 0 and 1 mean none.
        chunk_indexes: Chunks of this shard that are part of the push.
        ranges: Data consumed since the push before.
        averaged_buffers: Buffers of the schema that are averaged in SSP and ASP, by
            their entries; other buffers are replaced.
        gradient_norm: L2 norm of the sender's whole gradient, 0 if it is not finite.
        loads_state: Whether the state that the worker has staged is loaded first.
        is_of_longest: Whether its worker was the longest member when it was made.
        scheduler_steps: Steps of the worker's schedulers of this optimizer.
        spec_digest: Declaration of the optimizer that the hyperparameters are of.
        value_entries: Tensors of which it has values, which replace the shard's.
        publishes: Whether all that it has are values, and it is no step.
        continues_batch: Whether it is a further step on the batch of the push before.
        slack_ms: How long its worker can go on without the answer; None if it has not
            said.
    """

    optimizer: str
    weight: float
    hyperparameters: tuple[tuple[float, ...], ...] = ()
    finite: bool = True
    loss_scale: float = 1.0
    chunk_indexes: frozenset[int] = frozenset()
    ranges: tuple[DataRange, ...] = ()
    averaged_buffers: frozenset[int] = frozenset()
    gradient_norm: float = 0.0
    loads_state: bool = False
    is_of_longest: bool = False
    scheduler_steps: tuple[int, ...] = ()
    spec_digest: str = ""
    value_entries: frozenset[int] = frozenset()
    publishes: bool = False
    continues_batch: bool = False
    slack_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChunk:
    """A chunk of a push, received and not applied.

    Attributes:
        digest: Of the bytes, which set a resend apart from a conflict.
        presence: For each slice of the chunk, whether the payload holds it.
        payload: The bytes; the core hands them on unread.
    """

    digest: int
    presence: tuple[bool, ...]
    payload: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a push or pull.

    Attributes:
        outcome: What became of it.
        generation: Newest generation this shard knows.
        version: Steps of all workers ever that are in the values.
        frontier: Smallest clock over the members.
        clock: The worker's clock after it; when dropped, the newest clock.
        staleness: Updates applied between the values its gradient came from and it.
        mode: Mode under which the values are sent.
        staleness_bound: Bound under which the values are sent, in clocks.
        closed_sequence: The worker's pushes up to it are done or closed.
        nonfinite_worker_ids: For whose gradient it was skipped.
        grad_norm: Norm of what was applied before it was clipped; None if it was not
            measured.
        gradient_factor: What its gradient was multiplied by, 0 if it did not count.
    """

    outcome: Outcome
    generation: int
    version: int
    frontier: int
    clock: int
    staleness: int = 0
    mode: Mode = Mode.BSP
    staleness_bound: int = 0
    closed_sequence: int = 0
    nonfinite_worker_ids: tuple[str, ...] = ()
    grad_norm: float | None = None
    gradient_factor: float = 1.0
