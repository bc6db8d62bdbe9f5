"""What a shard remembers of a push, measured alone.

`python -m psserver.bench.dedupe CHUNK_COUNT REPETITION_COUNT` prints a JSON list, the
seconds of each push.
"""

import json
import sys
import time

from psserver.shard.core.push import PushWindow, StagedChunk, Trailer
from pswire.membership import Outcome, WorkerKey


def push_durations_s(chunk_count: int, repetition_count: int) -> list[float]:
    """Time of all that it does for a push, of each of several pushes."""
    window = PushWindow(WorkerKey("w0", 1))
    trailer = Trailer(
        optimizer="optimizer", weight=1.0, chunk_indexes=frozenset(range(chunk_count))
    )
    durations = []
    for sequence in range(1, repetition_count + 1):
        chunks = [
            StagedChunk(digest=sequence + index, presence=(True,), payload=b"")
            for index in range(chunk_count)
        ]
        began = time.perf_counter()
        entry = window.open(sequence)
        assert entry is not None
        entry.add_trailer(trailer)
        for index, chunk in enumerate(chunks):
            entry.add_chunk(index, chunk)
        window.finish(sequence, Outcome.APPLIED)
        window.acknowledge(sequence)
        durations.append(time.perf_counter() - began)
    return durations


if __name__ == "__main__":
    print(json.dumps(push_durations_s(int(sys.argv[1]), int(sys.argv[2]))), flush=True)
