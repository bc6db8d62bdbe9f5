"""Going on after a push that was dropped: over the clocks that closed without it.

In the user's thread.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pswire.membership import Member, Record, WorkerKey
from pswire.reasons import ErrorReason
from psworker.errors import EvictedError, StepTimeoutError, WaitTimeoutError
from psworker.event_loop import EventLoop
from psworker.member.exchange import receive
from psworker.member.session import Session
from psworker.optim.push_result import PushResult
from psworker.tensors.value_store import ValueStore
from psworker.transport.values import PushReply

logger: Final = logging.getLogger("psworker")


@dataclass(frozen=True, slots=True)
class Jump:
    """Where a worker goes on.

    Attributes:
        generation: Of the record that says what clocks mean.
        clock: Newest clock that is closed.
        sequence: Its push of that clock, up to which all are settled.
    """

    generation: int
    clock: int
    sequence: int


def find_jump(
    loop: EventLoop,
    session: Session,
    replies: Sequence[PushReply],
    *,
    sequence: int,
    deadline: float,
) -> Jump:
    """Where a worker goes on whose push was dropped.

    Args:
        loop: Where calls run.
        session: The worker.
        replies: What the shards have answered to the push.
        sequence: Its number.
        deadline: Time of the monotonic clock.

    Raises:
        StepTimeoutError: The record that the shards go by did not come in time.
        EvictedError: It has no place for this worker.
    """
    generation = max(reply.generation for reply in replies)
    try:
        record = loop.run(
            session.membership.wait_generation(generation), left_s(deadline)
        )
    except TimeoutError:
        raise StepTimeoutError(
            f"the shards are in generation {generation}, of which "
            f"{session.control.peer} has not told in time; step() again goes on with "
            "the same push",
            reason=ErrorReason.WAIT_TIMEOUT,
        ) from None
    member = member_in(record, session.worker)
    newest = max(sequence, *(reply.closed_sequence for reply in replies))
    return Jump(record.generation, member.clock_of(newest), newest)


def pull_jump(
    loop: EventLoop, session: Session, store: ValueStore, jump: Jump, deadline: float
) -> list[PushReply]:
    """Pulls the values of the clock after which the worker goes on.

    Raises:
        StepTimeoutError: They did not come in time.
    """
    held_digests = store.digests()
    try:
        return receive(
            loop,
            lambda receiver: session.shards.pull(
                jump.generation,
                jump.clock,
                receiver,
                held_digests=held_digests,
                timeout_s=left_s(deadline),
            ),
            store,
        )
    except WaitTimeoutError as error:
        raise StepTimeoutError(
            f"{error}; step() again goes on with the same push",
            reason=error.reason,
            facts=error.facts,
        ) from None


def pull_lost(
    loop: EventLoop,
    session: Session,
    store: ValueStore,
    result: PushResult,
    deadline: float,
) -> None:
    """Pulls all values, where a change did not fit those that are here.

    Raises:
        StepTimeoutError: They did not come in time.
    """
    logger.warning(
        "a shard has sent changes of other values than this worker has: it pulls all"
    )
    record = session.membership.record
    generation = record.generation if record is not None else 0
    jump = Jump(generation, result.clock, 0)
    pull_jump(loop, session, store, jump, deadline)
    store.held.is_lost = False


def member_in(record: Record | None, worker: WorkerKey) -> Member:
    """A worker's place in a record.

    Raises:
        EvictedError: It has none.
    """
    member = record.member_of(worker) if record is not None else None
    if member is None:
        raise EvictedError(
            f"worker {worker.worker_id} is no member of the job any more"
        )
    return member


def left_s(deadline: float) -> float:
    """Seconds until a time of the monotonic clock, a little above 0 when it is past."""
    return max(0.01, deadline - time.monotonic())
