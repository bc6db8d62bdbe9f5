"""Making a call again, on the event loop."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pswire.reasons import ErrorReason, Refusal
from psworker.transport.call_error import CallError

T = TypeVar("T")

_log = logging.getLogger("psworker")


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
