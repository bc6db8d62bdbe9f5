"""Calls: how one fails, without gRPC's types, and how it is made again.

Any failure is one of two: *decided*, the server refused and nothing changed; or
*unknown*, and only asking shows what became of it. In the event loop.
"""

import asyncio
import logging
import random
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
)
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from pswire.error_details import is_decided, plain_details, refusal_from_rpc_error
from pswire.reasons import CATALOGUE, ErrorReason, Refusal
from pswire.security.credentials import Credentials
from psworker.errors import LimitError, PsError, UnavailableError, error_of_refusal

Call = TypeVar("Call", bound="grpc.aio.Call")

_HOPELESS_CODES: Final = frozenset(
    {"UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED"}
)
"""Codes that nothing but a change on one of the sides makes go away."""

T = TypeVar("T")

_log = logging.getLogger("psworker")


class CallError(Exception):
    """A call that failed.

    Attributes:
        code: Name of the gRPC status code.
        refusal: The server's reason, `None` when gRPC made the status up.
        is_decided: Whether the server refused and nothing changed.
    """

    def __init__(
        self, peer: str, code: str, text: str, *, refusal: Refusal | None, decided: bool
    ) -> None:
        super().__init__(f"{peer}: {code}: {text}")
        self.peer = peer
        self.code = code
        self.text = text
        self.refusal = refusal
        self.is_decided = decided

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may succeed later without any change."""
        if self.refusal is not None:
            return CATALOGUE[self.refusal.reason].retryable
        if self._is_too_large:
            return False
        return not self.is_decided and self.code not in _HOPELESS_CODES

    @property
    def _is_too_large(self) -> bool:
        # gRPC's own refusal of a message, by either side; it has no code of its own.
        return self.code == "RESOURCE_EXHAUSTED" and "larger than max" in self.text

    def to_ps_error(self) -> PsError:
        """The exception that a user sees."""
        if self.refusal is not None:
            return error_of_refusal(self.refusal)
        if self._is_too_large:
            return LimitError(
                f"a message to or from {self.peer} is too large: {self.text}; what "
                "describes a model or an optimizer is smaller for fewer tensors, and "
                "anything else is a bug of paramserver: please report it"
            )
        return UnavailableError(
            f"{self.peer} gave no answer ({self.code.lower().replace('_', ' ')}: "
            f"{self.text}); look into its log"
        )


@contextmanager
def translated(peer: str) -> Iterator[None]:
    """Turns gRPC's errors, and answers that can't be read, into `CallError`."""
    began_s = time.monotonic()
    try:
        yield
    except grpc.aio.AioRpcError as error:
        refused = refusal_from_rpc_error(error)
        if refused is not None and refused.reason is ErrorReason.UNAUTHENTICATED:
            token = Credentials.from_environment().token
            if token is not None and token.was_replaced(began_s):
                # Between the call and its refusal: the next call shows the new one.
                refused = Refusal(ErrorReason.CREDENTIAL_ENDED, refused.message)
        raise CallError(
            peer,
            error.code().name,
            plain_details(error.details() or ""),
            refusal=refused,
            decided=is_decided(error.code(), refused),
        ) from error
    except Refusal as refusal:
        # What came back can't be read: asking again would not change it.
        raise CallError(
            peer, "INTERNAL", refusal.message, refusal=refusal, decided=False
        ) from refusal
    except grpc.aio.UsageError as error:
        # The channel was closed below the call.
        raise CallError(
            peer, "CANCELLED", str(error), refusal=None, decided=False
        ) from error


@asynccontextmanager
async def calling(peer: str, start: Callable[[], Call]) -> AsyncIterator[Call]:
    """Starts a call, and cancels it when it is left early.

    So the server hears of it at once. Errors are as of `translated`, from the start on:
    a closed channel refuses there.
    """
    with translated(peer):
        call = start()
        try:
            yield call
        finally:
            call.cancel()


async def until_decided(
    attempt: Callable[[float], Awaitable[T]],
    deadline: float,
    *,
    on_failure: Callable[[CallError], None] | None = None,
) -> T:
    """Makes an idempotent call again while its outcome is unknown.

    Args:
        attempt: Makes the call; takes the seconds that are left.
        deadline: Time of the loop after which no attempt begins.
        on_failure: Called with the error of every attempt that failed.

    Raises:
        CallError: The server refused, or, if it is retryable, the deadline passed.
    """
    attempt_count = 0
    refused: CallError | None = None
    while True:
        try:
            return await attempt(left_s(deadline))
        except CallError as error:
            if on_failure is not None:
                on_failure(error)
            if not error.is_retryable:
                raise
            if error.refusal is not None:
                if refused is None and _is_news(error.refusal):
                    _log.warning("%s; trying again", error.refusal.text)
                refused = error
            if now() >= deadline:
                # The deadline itself ends the last attempt, which then says nothing.
                raise refused or error from None
        await pause(attempt_count)
        attempt_count += 1


def _is_news(refusal: Refusal) -> bool:
    """Whether somebody has to do something for a call to succeed."""
    return refusal.reason is ErrorReason.STATE_NOT_WRITTEN


@contextmanager
def told_to_users() -> Iterator[None]:
    """Turns a `CallError` into the exception that a user sees."""
    try:
        yield
    except CallError as error:
        raise error.to_ps_error() from None


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first failure cancels the others and is raised."""
    coroutines = list(work)
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pause(attempt: int) -> None:
    """Waits before an attempt: 50 ms doubling to 1 s, with jitter."""
    # The jitter keeps workers that failed together from coming back together.
    await asyncio.sleep(min(1.0, 0.05 * 2 ** min(attempt, 5)) * random.uniform(0.5, 1))


def now() -> float:
    """Seconds on the running loop's clock."""
    return asyncio.get_running_loop().time()


def left_s(deadline: float) -> float:
    """Seconds until a time of the running loop, a little above 0 when it is past."""
    return max(0.01, deadline - now())
