"""How long a job stood still, from its shards' histories.

All processes of a test are on one machine, whose monotonic clock they share.
"""

import json
from pathlib import Path


def seconds_to_next_clock(history: Path, worker_id: str, lost_at_s: float) -> float:
    """From the loss of a worker to the first clock without it, on every shard.

    A clock that had all of the lost worker's push closes without waiting for anything;
    the one after it is the first that waits.
    """
    return max(
        _on_shard(path, worker_id, lost_at_s) for path in history.glob("shard-*.jsonl")
    )


def _on_shard(path: Path, worker_id: str, lost_at_s: float) -> float:
    waits_for_eviction = False
    for text in path.read_text().splitlines():
        line = json.loads(text)
        at_s = float(line["t_ms"]) / 1000
        if at_s < lost_at_s:
            continue
        if line["type"] == "record" and any(
            name == worker_id for name, *_ in line["departures"]
        ):
            waits_for_eviction = True
        if line["type"] == "done" and waits_for_eviction:
            return at_s - lost_at_s
    raise AssertionError(f"{path.name}: no clock closed without {worker_id}")
