"""`psctl events`: what has happened to a job, and what happens, also over restarts."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import typer

from psctl.options import say
from psctl.status import ask
from psctl.tables import time_text
from pswire.addresses import Address
from pswire.limits import WAITING_INTERVAL_MS
from pswire.names import printable
from pswire.status_document import Document
from psworker.transport.calls import CallError
from psworker.transport.status_client import fetch_document, watch_events

ANSWER_TIMEOUT_S: Final = 5.0
RETRY_INTERVAL_S: Final = 0.5

_FIRST_WAIT_S: Final = 10.0
"""Longest wait for what the coordinator remembers."""


async def followed(
    coordinator: Address, after: int, notice: Callable[[str], None]
) -> AsyncGenerator[Document]:
    """Yields events without an end, also over restarts of the coordinator.

    Args:
        coordinator: Of the job.
        after: Number of the last event that is known.
        notice: Called with what is wrong, once for each outage.

    Raises:
        CallError: The coordinator refuses: asking again would not change that.
    """
    address = str(coordinator)
    job_id, told_s = "", -float("inf")
    while True:
        try:
            status = await fetch_document(address, timeout_s=ANSWER_TIMEOUT_S)
            before, job_id = job_id, status["job"]["job_id"]
            if before not in ("", job_id):
                notice(f"another job is at {coordinator} now, with events of its own")
                after = 0
            async with aclosing(
                watch_events(address, after=after, follow=True)
            ) as events:
                async for event in events:
                    after = event["number"]
                    yield event
        except CallError as error:
            if not error.is_retryable:
                raise
            if time.monotonic() - told_s >= WAITING_INTERVAL_MS / 1000:
                told_s = time.monotonic()
                notice(f"waiting for the coordinator at {coordinator}: {error.text}")
        await asyncio.sleep(RETRY_INTERVAL_S)


def event_text(event: Document) -> str:
    """A line for people, with the time of this machine."""
    at = time_text(event["at_unix_s"], "%Y-%m-%d %H:%M:%S")
    return f"{at}  {event['kind']:<19}  {printable(event['text'])}"


def print_events(
    coordinator: Address, *, after: int, follow: bool, as_json: bool
) -> None:
    """Prints events, oldest first; with `follow` until it is interrupted."""

    def show(event: Document) -> None:
        # Each at once: a script waits for it behind a pipe.
        print(json.dumps(event) if as_json else event_text(event), flush=True)

    async def past() -> None:
        async for event in watch_events(str(coordinator), after=after, follow=False):
            show(event)

    async def on() -> None:
        async with aclosing(followed(coordinator, after, say)) as events:
            async for event in events:
                show(event)

    try:
        if not follow:
            ask(coordinator, past(), timeout_s=_FIRST_WAIT_S)
            return
        # A coordinator that is not there from the start is told as by other commands.
        fetched = fetch_document(str(coordinator), timeout_s=ANSWER_TIMEOUT_S)
        ask(coordinator, fetched, timeout_s=ANSWER_TIMEOUT_S)
        ask(coordinator, on(), timeout_s=ANSWER_TIMEOUT_S)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
