"""How long a job stood still, from its shards' histories.

All processes of a test are on one machine, whose monotonic clock they share.
"""

import json
from pathlib import Path


def seconds_to_next_clock(history: Path, worker_id: str, lost_at_s: float) -> float:
    """From the loss of a worker to the first clock without it, on every shard.

    A clock that had all of the lost worker's push closes without waiting for anything;
    the one after it is the first that waits.

    Args:
        history: Folder of the histories.
        worker_id: One that was taken out, and the others have made steps since.
        lost_at_s: When somebody saw that it was lost, which may be later than the
            job did.
    """
    return max(
        _on_shard(path, worker_id, lost_at_s) for path in history.glob("shard-*.jsonl")
    )


def _on_shard(path: Path, worker_id: str, lost_at_s: float) -> float:
    closed_s: float | None = None
    waits_for_eviction = False
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line["type"] == "record" and any(
            name == worker_id for name, *_ in line["departures"]
        ):
            waits_for_eviction, closed_s = True, None  # the last time counts
        if line["type"] == "done" and waits_for_eviction:
            waits_for_eviction, closed_s = False, float(line["t_ms"]) / 1000
    assert closed_s is not None, f"{path.name}: no clock closed without {worker_id}"
    return max(0.0, closed_s - lost_at_s)
