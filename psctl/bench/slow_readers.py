"""Readers of a job's snapshots on slow links, as a process.

`python -m psctl.bench.slow_readers COORDINATOR COUNT BYTES_PER_S`: each asks for the
newest snapshot again as soon as it has one, until the job is over. What they have
not taken waits in the shards, as gRPC sends no more than that.
"""

import asyncio
import sys
import time

from pswire.frames import ChunkFrame
from pswire.reasons import ErrorReason
from psworker.transport.calls import CallError
from psworker.transport.control_client import ControlClient
from psworker.transport.snapshot_client import SnapshotClient

_WAIT_S = 60.0
_PAUSE_S = 0.2
_FAILURES_MAX = 3
"""In a row: then the job is over. One or two have readers that were stopped between
their turns, for longer than connections and snapshots are kept."""


async def read_once(coordinator: ControlClient, bytes_per_s: float) -> int:
    """Reads a snapshot at a speed that all readers of the process have together.

    Returns:
        Bytes of it.
    """
    byte_count = 0

    def take(frame: ChunkFrame) -> None:
        nonlocal byte_count
        byte_count += len(frame.data)
        time.sleep(len(frame.data) / bytes_per_s)

    found = await coordinator.request_snapshot(-1, wait_s=_WAIT_S, timeout_s=_WAIT_S)
    clients = [SnapshotClient(shard) for shard in found.shards]
    try:
        for client in clients:
            await client.pull_snapshot(
                found.job_id,
                found.snapshot_id,
                take,
                timeout_s=found.pin_ttl_ms / 1000,
            )
    finally:
        for client in clients:
            await client.close()
    await coordinator.release_snapshot(
        found.snapshot_id, found.pin_id, timeout_s=_WAIT_S
    )
    return byte_count


async def _read_on(address: str, bytes_per_s: float) -> None:
    """Reads until the job is over."""
    coordinator, has_read, failures = ControlClient(address), False, 0
    while True:
        try:
            await read_once(coordinator, bytes_per_s)
        except CallError as error:
            refusal = error.refusal
            if refusal is None or refusal.reason is not ErrorReason.NOT_STARTED:
                failures += 1
            if failures == _FAILURES_MAX:
                if has_read:
                    return
                raise
            await asyncio.sleep(_PAUSE_S)
        else:
            has_read, failures = True, 0


async def read_slowly(address: str, count: int, bytes_per_s: float) -> None:
    """Reads with so many readers, each at this speed, until the job is over."""
    await asyncio.gather(
        *(_read_on(address, count * bytes_per_s) for _ in range(count))
    )


if __name__ == "__main__":
    asyncio.run(read_slowly(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
