"""Calls that take long, of a disk, a store or memory, each in a thread of its own."""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from psserver.logs import RefusalLog

Result = TypeVar("Result")

THREAD_RETRY_S: Final = 1.0
"""Between two tries to start a thread, where the system allows none just now."""

_log: Final = RefusalLog(logging.getLogger("psserver"))

_BACKGROUND_NICENESS: Final = 10
"""Of threads that work beside training: a tenth of a processor that others want. The
least there is would be too little for one that holds a lock when its turn ends."""


async def in_thread(
    call: Callable[[], Result], *, is_background: bool = False
) -> Result:
    """Makes a call in a daemon thread and returns its result.

    Not in the executor of the loop: the process could not end before a disk answers,
    which may be never.

    Args:
        call: What is to be done.
        is_background: Whether it is to take what training leaves of the processors.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(do: Callable[[], None]) -> None:
        if not future.done():
            do()

    def run() -> None:
        if is_background and sys.platform == "linux":
            # There, and only there, threads have priorities of their own. Those that
            # they start take theirs.
            os.nice(_BACKGROUND_NICENESS)
        try:
            do = partial(future.set_result, call())
        except BaseException as error:
            do = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle, do)

    while True:
        try:
            threading.Thread(target=run, name="files", daemon=True).start()
            break
        except RuntimeError as error:  # the process, or its user, has too many
            _log.warning("work on files waits, and steps go on: %s", error)
            await asyncio.sleep(THREAD_RETRY_S)
    return await future
