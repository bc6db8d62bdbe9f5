"""Going on after a push that was dropped: over the clocks that closed without it.

In the user's thread.
"""

import logging
import time
from typing import Final

from pswire.reasons import ErrorReason
from psworker.errors import StepTimeoutError, WaitTimeoutError
from psworker.event_loop import EventLoop
from psworker.member.core import Missed, Pull
from psworker.member.exchange import receive
from psworker.member.session import Session
from psworker.optim.push_result import PushResult
from psworker.tensors.value_store import ValueStore
from psworker.transport.values import PushReply

logger: Final = logging.getLogger("psworker")


def catch_up(
    loop: EventLoop, session: Session, missed: Missed, deadline: float
) -> Pull:
    """Where a worker goes on whose push was dropped, once the record is here.

    Args:
        loop: Where calls run.
        session: The worker.
        missed: What the job has closed without it.
        deadline: Time of the monotonic clock.

    Raises:
        StepTimeoutError: The record that the shards go by did not come in time.
        EvictedError: It has no place for this worker.
    """
    try:
        loop.run(
            session.membership.wait_generation(missed.generation), left_s(deadline)
        )
    except TimeoutError:
        raise StepTimeoutError(
            f"the shards are in generation {missed.generation}, of which "
            f"{session.control.peer} has not sent the record in time; step() again "
            "goes on with the same push",
            reason=ErrorReason.WAIT_TIMEOUT,
        ) from None
    pull = session.core.catch_up(missed)
    assert pull is not None, "the record is here"
    return pull


def pull_values(
    loop: EventLoop, session: Session, store: ValueStore, pull: Pull, deadline: float
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
                pull.generation,
                pull.clock,
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
    pull = Pull(session.core.generation, result.clock)
    pull_values(loop, session, store, pull, deadline)
    store.base.is_lost = False


def left_s(deadline: float) -> float:
    """Seconds until a time of the monotonic clock, a little above 0 when it is past."""
    return max(0.01, deadline - time.monotonic())
