"""Which call of a script is under way at a worker, and in which thread.

A step may wait for minutes, and meanwhile other code of the script may run: a signal
handler, a `__del__` that the garbage collector calls, another thread. Its calls must
neither go on with the step's push nor leave it half done. So one call is under way at a
time. Of the same thread a second one is refused, since the first can't go on before it
has ended; of another thread it waits.

The lock is one that C acquires and releases, by `with`: a handler that raises between
two instructions of Python can't leave it taken.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from psworker.errors import (
    FORKED_TEXT,
    ClosedError,
    ConfigurationError,
    WaitTimeoutError,
)

P = ParamSpec("P")
T = TypeVar("T")

WAIT_S_DEFAULT: Final = 60.0


class UserCalls:
    """The calls of one worker."""

    def __init__(self, wait_s: float = WAIT_S_DEFAULT) -> None:
        """Takes the longest wait for the call of another thread."""
        self._lock: Any = threading.RLock()  # `_is_owned` is not in its stub
        self._wait_s = wait_s
        self._name = ""
        self._is_lent = False
        self._process_id = os.getpid()

    @property
    def is_within(self) -> bool:
        """Whether this thread has a call under way, which this one interrupts."""
        return bool(self._lock._is_owned()) and not self._is_lent

    @property
    def is_busy(self) -> bool:
        """Whether any thread has a call under way, so that another one would wait."""
        if not self._name or self._is_lent:
            return False
        if self._lock._is_owned() or not self._is_free(0.0):
            return True
        self._name = ""  # left by a call whose end was interrupted
        return False

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that is the worker."""
        return os.getpid() != self._process_id

    def refuse_within(self, name: str) -> None:
        """Raises a `ConfigurationError` within another call of the same thread."""
        if self.is_within:
            raise ConfigurationError(
                f"{name} was called while {self._name} of the same thread is under "
                "way, as by a signal handler, a hook or a __del__: nothing was done, "
                f"and {self._name} goes on if this error is caught there. Set a flag "
                f"in the handler, and call {name} where the flag is seen, after "
                f"{self._name} has returned"
            )

    def run(
        self, name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs a call, which has that name in the script, when no other is under way.

        Raises:
            ConfigurationError: It was called from within another one.
            WaitTimeoutError: The call of another thread did not end in time.
            ClosedError: This is a forked child.
        """
        if os.getpid() != self._process_id:
            raise ClosedError(FORKED_TEXT)
        if self._lock._is_owned():
            self.refuse_within(name)
        elif self._name:
            self._wait(name)
        with self._lock:
            outer, was_lent = self._name, self._is_lent
            self._name, self._is_lent = name, False
            try:
                return call(*args, **kwargs)
            finally:
                self._name, self._is_lent = outer, was_lent

    def lent(self, work: Callable[[], T]) -> T:
        """Runs code of the script within a call: it may make calls of its own."""
        was_lent, self._is_lent = self._is_lent, True
        try:
            return work()
        finally:
            self._is_lent = was_lent

    def _wait(self, name: str) -> None:
        """Returns when the call of another thread has ended."""
        other = self._name
        if not self._is_free(self._wait_s):
            raise WaitTimeoutError(
                f"{name} waited {self._wait_s:g} s for {other}, which is under way in "
                "another thread; nothing was done. Call it again, or in that thread "
                "between two steps"
            )

    def _is_free(self, timeout_s: float) -> bool:
        """Whether no other thread has a call under way, or none after that time."""
        try:
            return bool(self._lock.acquire(timeout=timeout_s))
        finally:
            if self._lock._is_owned():
                self._lock.release()


class _Caller(Protocol):
    """What makes calls of one worker."""

    _calls: UserCalls


S = TypeVar("S", bound=_Caller)


def in_turn(
    name: str,
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Makes a method a call of its worker, under the name that scripts have for it."""

    def decorate(
        call: Callable[Concatenate[S, P], T],
    ) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(call)
        def entrance(caller: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return caller._calls.run(name, call, caller, *args, **kwargs)

        return entrance

    return decorate
