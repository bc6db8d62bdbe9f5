"""What a shard's daemon does beside serving."""

import asyncio
import threading

import pytest

from psserver.shard import daemon


def test_the_end_of_a_shard_waits_for_no_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of torch's optimizers, which takes seconds on a busy machine."""
    begun, enough, done = threading.Event(), threading.Event(), threading.Event()

    def load() -> None:
        begun.set()
        enough.wait(60)
        done.set()

    async def start_and_end() -> None:
        importing = asyncio.create_task(daemon._import_optimizers())
        await asyncio.to_thread(begun.wait, 60)
        importing.cancel()

    monkeypatch.setattr(daemon, "load_optimizers", load)
    asyncio.run(start_and_end())
    assert begun.is_set()
    assert not done.is_set(), "the event loop has ended before"
    enough.set()
    assert done.wait(60)
