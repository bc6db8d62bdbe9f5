"""An answer that takes long to make and that many ask for, as of a page or a scrape."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

KEPT_S: Final = 1.0
"""For which an answer is given again: shards report every second."""


class SharedAnswer:
    """Made when somebody asks, once in a second at most, whoever asks how often."""

    def __init__(
        self,
        make: Callable[[], Awaitable[bytes]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._now_s = now_s
        self._made_s = -KEPT_S
        self._answer = b""
        self._making = asyncio.Lock()

    async def get(self) -> bytes:
        """The answer; those who ask while it is made wait for it."""
        async with self._making:
            if self._now_s() - self._made_s >= KEPT_S:
                self._answer = await self._make()
                self._made_s = self._now_s()
            return self._answer
