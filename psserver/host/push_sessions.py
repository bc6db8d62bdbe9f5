"""The calls that wait for the answers to pushes."""

from psserver.core.push import PushId
from psserver.host.push_session import PushSession
from pswire.reasons import ErrorReason, Refusal


class PushSessions:
    """The newest call of each push."""

    def __init__(self) -> None:
        self._sessions: dict[PushId, PushSession] = {}

    def of(self, push: PushId) -> PushSession | None:
        """The call of a push, if there is one."""
        return self._sessions.get(push)

    def attach(self, push: PushId, session: PushSession) -> None:
        """Makes a call the one of a push; one that was there before is ended."""
        self.fail(
            push, Refusal(ErrorReason.DRAINING, "a newer call carries the same push")
        )
        self._sessions[push] = session

    def detach(self, push: PushId, session: PushSession) -> None:
        """The call has ended."""
        if self._sessions.get(push) is session:
            del self._sessions[push]

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
