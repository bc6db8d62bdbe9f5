"""How an evicted worker that lives takes part again: a new start under the same id.

In the user's thread, inside `step()` or a loader. The push that was under way counts or
is thrown away, as the record of the eviction has decided on all shards alike; it is
never sent under a new id. Source: docs/decisions/0007.
"""

import logging
import time
from dataclasses import replace
from typing import Final

from psworker.errors import (
    EvictedError,
    StepTimeoutError,
    UnavailableError,
    WaitTimeoutError,
)
from psworker.event_loop import EventLoop
from psworker.member.catch_up import left_s
from psworker.member.core import outcome_of_done
from psworker.member.eviction import LostStart, Rejoined
from psworker.member.joining import Joined, Joining
from psworker.member.session import Session
from psworker.optim.prepare import Prepared
from psworker.optim.push_result import combine
from psworker.tensors.value_store import ValueStore
from psworker.transport.retries import told_to_users

logger: Final = logging.getLogger("psworker")


def join_first(
    loop: EventLoop,
    session: Session,
    store: ValueStore,
    given: Prepared,
    deadline: float,
) -> Joined:
    """Joins; a worker that is evicted before that tries again as a new start.

    Raises:
        EvictedError: A replacement has its place, or the time is over.
        PsError: See `Joining.join`.
    """
    while True:
        try:
            return Joining(loop, session, store).join(given, timeout_s=left_s(deadline))
        except EvictedError as error:
            if time.monotonic() >= deadline:
                raise
            logger.warning("joining again: %s", error)
        with told_to_users():
            loop.run(session.renew(left_s(deadline)))


class EvictedWorker:
    """A worker that can join again; see `Rejoining`."""

    def __init__(
        self,
        loop: EventLoop,
        session: Session,
        store: ValueStore,
        *,
        given: Prepared,
        timeout_s: float,
    ) -> None:
        """Remembers what the worker joined with.

        Args:
            loop: Where calls run.
            session: The worker.
            store: Takes the values.
            given: What `prepare` was given.
            timeout_s: Longest time to join again.
        """
        self._loop = loop
        self._session = session
        self._store = store
        self._given = given
        self._timeout_s = timeout_s
        self._cause = ""

    def rejoin(self, lost: LostStart) -> Rejoined:
        """Joins as a new start under the same id; see `Rejoining`."""
        deadline = time.monotonic() + self._timeout_s
        if self._session.worker == lost.worker:
            self._cause = self._session.membership.eviction_cause
        try:
            while True:
                self._renew(lost, deadline)
                try:
                    return self._join(lost, deadline)
                except EvictedError as error:
                    # Evicted before it was a member: it was stopped once more.
                    if time.monotonic() >= deadline:
                        raise StepTimeoutError(f"{error}") from None
        except (WaitTimeoutError, UnavailableError) as error:
            raise StepTimeoutError(
                f"worker {lost.worker.worker_id} was evicted and could not join again "
                f"within {self._timeout_s:g} s: {error}; step() again goes on trying",
                reason=error.reason,
                facts=error.facts,
            ) from None

    def _renew(self, lost: LostStart, deadline: float) -> None:
        """Registers a new start, unless an earlier call has done so.

        Raises:
            EvictedError: A replacement has this worker's place.
            PsError: The coordinator was not reached, or it refused.
        """
        session = self._session
        failure = session.membership.failure
        if session.worker == lost.worker or isinstance(failure, EvictedError):
            with told_to_users():
                self._loop.run(session.renew(left_s(deadline)))

    def _join(self, lost: LostStart, deadline: float) -> Rejoined:
        session = self._session
        joining = Joining(self._loop, session, self._store)
        joined = joining.join(self._given, timeout_s=left_s(deadline))
        try:
            outcome = self._loop.run(self._outcome_of_push(lost))
        except BaseException:
            if joined.stand_in is not None:
                self._loop.run(joined.stand_in.abandon())
            raise
        push = replace(combine(joined.replies), outcome=outcome, rejoined=True)
        logger.warning(
            "worker %s was evicted in its start %d: %s; it has joined again as start "
            "%d, at clock %d of generation %d%s",
            lost.worker.worker_id,
            lost.worker.incarnation,
            self._cause,
            session.worker.incarnation,
            push.clock,
            joined.generation,
            f"; its push under way was {outcome}" if lost.pushes else "",
        )
        return Rejoined(joined.member, push, joined.stand_in)

    async def _outcome_of_push(self, lost: LostStart) -> str:
        """What became of the push under way, as the record of the eviction says."""
        shards = self._session.shards
        if not lost.pushes or not await shards.was_done(lost.worker, lost.sequence):
            return "dropped"
        # A clock may have been skipped, or have not waited for it.
        return outcome_of_done(await shards.outcomes_of(lost.pushes))
