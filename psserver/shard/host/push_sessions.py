"""The calls that wait for the answers to pushes."""

from collections.abc import Collection
from typing import Final

from psserver.shard.core.effects import Finish, Staged
from psserver.shard.core.push import PushId, Reply
from psserver.shard.host.push_session import Outgoing, PushSession
from psserver.shard.host.shard_model import ShardModel
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason, Refusal

CALLS_OF_WORKER_MAX: Final = 8
"""Calls that carry pushes of one worker. It has one, or two where steps overlap, and
those that it has given up and whose end has not come yet."""


class PushSessions:
    """The newest call of each push, and the newest few of each worker."""

    def __init__(self) -> None:
        self._sessions: dict[PushId, PushSession] = {}
        self._open: dict[WorkerKey, list[PushSession]] = {}

    def begin(self, worker: WorkerKey, session: PushSession) -> None:
        """A worker has one more call; its oldest one is ended if it has too many."""
        own = self._open.setdefault(worker, [])
        own.append(session)
        if len(own) > CALLS_OF_WORKER_MAX:
            own.pop(0).fail(
                Refusal(
                    ErrorReason.DRAINING,
                    f"{worker} has {CALLS_OF_WORKER_MAX} newer calls that push",
                )
            )

    def of(self, push: PushId) -> PushSession | None:
        """The call of a push, if there is one."""
        return self._sessions.get(push)

    def attach(
        self, model: ShardModel, push: PushId, session: PushSession
    ) -> Reply | None:
        """Makes a call the one of a push; one that was there before is ended.

        What the push has already brought about is queued at once.

        Returns:
            The answer, if the push is done.
        """
        if push in self._sessions:
            self.fail(
                push,
                Refusal(ErrorReason.DRAINING, "a newer call carries the same push"),
            )
        self._sessions[push] = session
        _put_chunks(model, session, model.core.applied_chunks(push))
        reply = model.core.reply_to(push)
        if reply is not None:
            session.finish(reply)
        return reply

    def finish(self, model: ShardModel, effect: Finish) -> bool:
        """Answers a push; returns whether a call waits for the answer."""
        session = self._sessions.get(effect.push)
        if session is None:
            return False
        if effect.needs_all:
            _put_chunks(model, session, [chunk.index for chunk in model.chunks])
        session.finish(effect.reply)
        return True

    def tell_staged(self, effect: Staged) -> None:
        """Tells a push's call that everything of its clock is there."""
        session = self._sessions.get(effect.push)
        if session is not None:
            session.tell_staged(effect.choice)

    def give_anew(self) -> None:
        """Another mode begins: answers go with values that are as new as it demands."""
        for session in self._sessions.values():
            session.give_anew()

    def detach(self, push: PushId, session: PushSession) -> None:
        """The call has ended."""
        if self._sessions.get(push) is session:
            del self._sessions[push]
        own = self._open.get(push.worker, [])
        if session in own:
            own.remove(session)
            if not own:
                del self._open[push.worker]

    def fail(self, push: PushId, refusal: Refusal) -> None:
        """Ends a push's call with an error."""
        session = self._sessions.get(push)
        if session is not None:
            session.fail(refusal)

    def end_all(self, refusal: Refusal) -> None:
        """Ends every call with an error."""
        for session in self._sessions.values():
            session.fail(refusal)

    @property
    def oldest_ms(self) -> int | None:
        """Since when the oldest call is there; None when there is none."""
        return min(
            (session.opened_ms for session in self._sessions.values()), default=None
        )


def _put_chunks(
    model: ShardModel, session: PushSession, chunk_indexes: Collection[int]
) -> None:
    """Queues chunks that the call has not had, but for what never changes."""
    for chunk_index in sorted(chunk_indexes, reverse=True):
        presence = model.engine.updatable(chunk_index)
        if any(presence):
            session.put(Outgoing(chunk_index, presence))
