"""Shards whose steps take two phases, and what they tell."""

from pswire.membership import Mode
from tests.doubles.driven_shard import TWO_PHASE, DrivenShard


def shard_of(
    *names: str, chunks: tuple[int, ...] = (0,), mode: Mode = Mode.BSP
) -> DrivenShard:
    return DrivenShard(dict.fromkeys(names, 0), chunks, mode=mode, rules=TWO_PHASE)


def told(shard: DrivenShard) -> list[tuple[str, int, str]]:
    """Who was told `staged`: its id, the clock, and the ids of the contributors."""
    return [
        (
            each.push.worker.worker_id,
            each.choice.clock,
            "".join(worker.worker_id for worker in each.choice.workers),
        )
        for each in shard.staged()
    ]
