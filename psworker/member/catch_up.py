"""Going on over clocks that closed without this worker's gradient.

Its push was dropped, or it has joined and does not come to its first step. In the
user's thread, but for what a late joiner pushes meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final

from pswire.reasons import ErrorReason
from pswire.schema import OptimizerSpec
from psworker.errors import StepTimeoutError, WaitTimeoutError
from psworker.event_loop import EventLoop
from psworker.member.core import Missed, NextPush, Pull
from psworker.member.exchange import receive
from psworker.member.outgoing_push import OutgoingPush
from psworker.member.session import Session
from psworker.optim.push_result import PushResult
from psworker.tensors.value_store import ValueStore
from psworker.transport.ports import Receiver
from psworker.transport.values import PushReply, PushTrailer

logger: Final = logging.getLogger("psworker")

JOIN_LIMIT_S: Final = 30.0
"""How long the others wait for a joiner, before it takes part with nothing."""

_PUSH_TIMEOUT_S: Final = 60.0


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
            lambda: session.membership.wait_generation(missed.generation),
            left_s(deadline),
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


class LateJoiner:
    """A worker that has joined others who train, until its first step.

    The others wait for its part in their clocks. Its first values may take long, and
    its first batch or a compiler too: after a while the event loop pushes weight 0 for
    it, until the user's thread is there. What was computed from the values of before
    is too old to count then.
    """

    def __init__(
        self,
        loop: EventLoop,
        session: Session,
        store: ValueStore,
        specs: Mapping[str, OptimizerSpec],
    ) -> None:
        """Pushes weight 0 from `JOIN_LIMIT_S` after this call on.

        Args:
            loop: Where calls run.
            session: The worker, which is a member.
            store: Takes the values.
            specs: Its optimizers by name.
        """
        self._loop = loop
        self._session = session
        self._store = store
        self._specs = specs
        # Of this start: the session goes on to the next one.
        self._core = session.core
        self._shards = session.shards
        self._settled_sequence = 0
        self._has_arrived = False
        self._is_behind = False
        self._push: asyncio.Task[None] | None = None
        self._pushing = loop.run(self._begin)

    def arrive(self, timeout_s: float) -> int:
        """The user's thread is there: the last push made for it, 0 for none.

        Raises:
            StepTimeoutError: That push is not complete in time.
        """
        if self._has_arrived:
            return 0
        try:
            self._loop.run(self._end_pushing, timeout_s)
        except TimeoutError:
            raise StepTimeoutError(
                "the clock that others began while this worker was not there is not "
                f"complete within {timeout_s:g} s; step() again goes on",
                reason=ErrorReason.WAIT_TIMEOUT,
            ) from None
        self._has_arrived = True
        if sequence := self._settled_sequence:
            self._is_behind = True
            logger.warning(
                "this worker took longer than %.0f s from joining to its first step, "
                "and %d clocks went on without it: what it has computed meanwhile is "
                "thrown away",
                JOIN_LIMIT_S,
                sequence,
            )
        return self._settled_sequence

    def pull_missed(self, pull: Pull, timeout_s: float) -> None:
        """Pulls the values of clocks that went on without the worker, if any did.

        Args:
            pull: Of its clock.
            timeout_s: Longest wait for them.

        Raises:
            StepTimeoutError: They did not come in time.
        """
        if self._is_behind:
            deadline = time.monotonic() + timeout_s
            pull_values(self._loop, self._session, self._store, pull, deadline)
            self._is_behind = False

    def abandon(self) -> None:
        """Ends its pushes at once: this start is at its end."""
        if not self._has_arrived:
            self._loop.run(self._abandon)
            self._has_arrived = True

    # On the event loop

    async def _begin(self) -> "asyncio.Task[None]":
        return asyncio.ensure_future(self._push_nothing())

    async def _end_pushing(self) -> None:
        """Returns once the push that is under way is settled.

        An error is not raised: the worker's own next call meets it.
        """
        self._pushing.cancel()
        await asyncio.gather(self._pushing, return_exceptions=True)
        if self._push is not None:
            await asyncio.wait({self._push})
            if not self._push.cancelled():
                self._push.exception()

    async def _abandon(self) -> None:
        self._pushing.cancel()
        if self._push is not None:
            self._push.cancel()
        await self._end_pushing()

    async def _push_nothing(self) -> None:
        await asyncio.sleep(JOIN_LIMIT_S)
        while self._core.member is not None:
            place = self._core.next_push()
            awaited = await self._shards.await_contribution(
                place.generation, place.clock, place.sequence
            )
            spec = self._specs.get(awaited.optimizer)
            spec = spec or next(iter(self._specs.values()))
            self._push = asyncio.ensure_future(self._push_until_settled(spec, place))
            await asyncio.shield(self._push)

    async def _push_until_settled(self, spec: OptimizerSpec, place: NextPush) -> None:
        """Makes one push of weight 0: an id is never given up."""
        job_id = self._session.settings.job_id
        header = place.header(job_id, self._core.worker, spec.name)
        groups = tuple(group.hyperparameters for group in spec.groups)
        trailer = PushTrailer(weight=0.0, groups=groups, is_finite=True, ranges=())
        pushes = [
            OutgoingPush(
                header,
                trailer,
                shard_incarnation=incarnation,
                chunk_bitmap=(False,) * len(chunks),
                chunk_indexes=(),
                notify=asyncio.Event.set,
            )
            for incarnation, chunks in zip(
                self._shards.incarnations,
                self._store.placement.chunks_by_shard,
                strict=True,
            )
        ]
        receiver = Receiver(on_chunk=lambda _: None, on_waiting=lambda _: None)
        while True:
            try:
                replies = await self._shards.push(
                    pushes, receiver, timeout_s=_PUSH_TIMEOUT_S
                )
                break
            except StepTimeoutError:
                continue
        concluded = self._core.conclude(place.sequence, replies)
        self._settled_sequence = (
            concluded.sequence if isinstance(concluded, Missed) else place.sequence
        )
        self._core.acknowledge(self._settled_sequence)


def left_s(deadline: float) -> float:
    """Seconds until a time of the monotonic clock, a little above 0 when it is past."""
    return max(0.01, deadline - time.monotonic())
