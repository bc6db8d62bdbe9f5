"""Runs `psctl top`: asks, listens to keys, and paints."""

import asyncio
import os
import shutil
import signal
import sys
import time
from contextlib import aclosing, suppress
from typing import Final

from psctl.events import followed
from psctl.options import say
from psctl.status import ask
from psctl.tables import WIDTH_MAX
from psctl.top.screen import (
    Painter,
    can_show_whole_screen,
    keys_in,
    speaks_unicode,
    whole_screen,
)
from psctl.top.view import Choice, Seen, frame, whole
from pswire.addresses import Address
from psworker.transport.calls import CallError
from psworker.transport.status_client import (
    fetch_document,
    fetch_history,
    poll_documents,
    watch_events,
)

ANSWER_TIMEOUT_S: Final = 5.0


def run_top(coordinator: Address, interval_s: float) -> None:
    """Shows a job until a key ends it; on no terminal once."""
    seen = ask(coordinator, _first_look(coordinator), timeout_s=ANSWER_TIMEOUT_S)
    if not can_show_whole_screen():
        width = shutil.get_terminal_size((WIDTH_MAX, 0)).columns
        lines = whole(seen, width=width, unicode=speaks_unicode(sys.stdout))
        print("\n".join(line.text for line in lines), flush=True)
        say("this is no terminal: one look, not refreshed (`psctl status --json`)")
        return
    with whole_screen(sys.stdout, sys.stdin.fileno()), suppress(KeyboardInterrupt):
        asyncio.run(_Top(coordinator, seen, interval_s).run())


async def _first_look(coordinator: Address) -> Seen:
    """What there is before the screen is taken: errors are those of other commands."""
    address, seen = str(coordinator), Seen()
    document = await fetch_document(address, timeout_s=ANSWER_TIMEOUT_S)
    history = await fetch_history(address, timeout_s=ANSWER_TIMEOUT_S)
    losses = (point["metrics"].get("loss") for point in history["points"])
    seen.losses.extend(loss for loss in losses if loss is not None)
    seen.take(document)
    async for event in watch_events(address, after=0, follow=False):
        seen.events.append(event)
    return seen


class _Top:
    """The screen while it is shown, on the event loop."""

    def __init__(self, coordinator: Address, seen: Seen, interval_s: float) -> None:
        self._coordinator = coordinator
        self._seen = seen
        self._interval_s = interval_s
        self._choice = Choice()
        self._painter = Painter()
        self._unicode = speaks_unicode(sys.stdout)
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Returns when a key has ended it."""
        loop = asyncio.get_running_loop()
        keyboard = sys.stdin.fileno()
        loop.add_reader(keyboard, self._read_keys, keyboard)
        loop.add_signal_handler(signal.SIGWINCH, self._paint)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._over.set)
        self._paint()
        tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._listen())]
        waiter = asyncio.create_task(self._over.wait())
        try:
            done, _ = await asyncio.wait(
                [*tasks, waiter], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            loop.remove_reader(keyboard)
            for task in (*tasks, waiter):
                task.cancel()
            await asyncio.gather(*tasks, waiter, return_exceptions=True)

    async def _poll(self) -> None:
        answered_s = time.monotonic()
        documents = poll_documents(
            str(self._coordinator),
            interval_s=self._interval_s,
            timeout_s=ANSWER_TIMEOUT_S,
        )
        async with aclosing(documents):
            async for found in documents:
                now_s = time.monotonic()
                if isinstance(found, CallError):
                    self._seen.trouble = found.text
                    self._seen.silent_s = now_s - answered_s
                else:
                    answered_s = now_s
                    self._seen.take(found)
                self._paint()

    async def _listen(self) -> None:
        """Adds events; they are painted with the next status."""
        numbers = [event["number"] for event in self._seen.events]
        events = followed(self._coordinator, max(numbers, default=0), lambda _: None)
        async with aclosing(events):
            async for event in events:
                self._seen.events.append(event)

    def _read_keys(self, keyboard: int) -> None:
        for key in keys_in(os.read(keyboard, 64)) or [
            "q"
        ]:  # at its end nobody is there
            if key in ("q", "Q", "\x03"):
                self._over.set()
            self._choice.press(key)
        self._paint()

    def _paint(self) -> None:
        width, height = os.get_terminal_size(sys.stdout.fileno())
        lines = frame(
            self._seen,
            self._choice,
            width=max(20, width),
            height=max(4, height),
            unicode=self._unicode,
        )
        if text := self._painter.update(lines[:height], width, height):
            sys.stdout.write(text)
            sys.stdout.flush()
