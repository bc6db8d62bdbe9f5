"""Commits that a worker makes and that never leave it."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from psworker.transport.shard_client import ShardClient


@contextlib.contextmanager
def commits_held(
    worker_id: str, shard_index: int | None = None
) -> Iterator[threading.Event]:
    """Keeps a worker's commits, of one shard or all, from leaving.

    The event says that there is one to keep.
    """
    wanted = threading.Event()
    commit = ShardClient.commit

    async def held(client: ShardClient, *arguments: Any, **options: Any) -> bool:  # noqa: ANN401
        is_other_shard = shard_index not in (None, client.shard.shard_index)
        if client._worker.worker_id != worker_id or is_other_shard:
            return await commit(client, *arguments, **options)
        wanted.set()
        await asyncio.Event().wait()
        return False

    with mock.patch.object(ShardClient, "commit", held):
        yield wanted
