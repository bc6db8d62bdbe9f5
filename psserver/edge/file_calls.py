"""Calls that wait for a disk or a store, each in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(call: Callable[[], Result]) -> Result:
    """Makes a call in a daemon thread and returns its result.

    Not in the executor of the loop: the process could not end before a disk answers,
    which may be never.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(do: Callable[[], None]) -> None:
        if not future.done():
            do()

    def run() -> None:
        try:
            do = partial(future.set_result, call())
        except BaseException as error:
            do = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle, do)

    threading.Thread(target=run, name="files", daemon=True).start()
    return await future
