"""Promises that hold in every schedule, tried on many that are drawn.

`PS_SIM_SCHEDULES=5000 pytest tests/property/test_core_schedules.py` tries more;
`PS_SIM_SEED=1234` tries one.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from psserver.core.push import Outcome, PushId
from tests.doubles.simulated_worker import OwnPush
from tests.doubles.world import World

BLOCK_COUNT = 5
SCHEDULE_COUNT = int(os.environ.get("PS_SIM_SCHEDULES", "500"))
ONE_SEED = os.environ.get("PS_SIM_SEED")


def seeds_of(block: int) -> list[int]:
    if ONE_SEED is not None:
        return [int(ONE_SEED)] if block == 0 else []
    return list(range(block, SCHEDULE_COUNT, BLOCK_COUNT))


def chunks_of(world: World, own: OwnPush) -> Iterator[tuple[int, int]]:
    """Places where a push's gradient belongs: shard and chunk."""
    for shard_index, trailer in own.trailers.items():
        if trailer.weight > 0:
            for chunk_index in trailer.chunk_indexes:
                yield shard_index, chunk_index


def check_exactly_once(world: World) -> None:
    """Each acknowledged push is in every chunk it has exactly once, or skipped."""
    expected: list[dict[int, Counter[PushId]]] = [
        {index: Counter() for index in shard.chunk_indexes} for shard in world.shards
    ]
    for worker in world.workers.values():
        for own in worker.acknowledged:
            if worker.outcome_of(own) is not Outcome.SKIPPED:
                for shard_index, chunk_index in chunks_of(world, own):
                    expected[shard_index][chunk_index][own.push] += 1
    assert [shard.values for shard in world.shards] == expected


def check_torn_only_once(world: World) -> None:
    """As `check_exactly_once`, but for the one push that a lost worker had begun."""
    for worker in world.workers.values():
        acknowledged = {own.push: own for own in worker.acknowledged}
        for own in worker.pushes.values():
            counts = [
                world.shards[shard_index].values[chunk_index][own.push]
                for shard_index, chunk_index in chunks_of(world, own)
            ]
            assert all(count <= 1 for count in counts)
            if own.push in acknowledged:
                is_skipped = worker.outcome_of(own) is Outcome.SKIPPED
                assert set(counts) <= {0 if is_skipped else 1}
            else:
                assert worker.key in world.lost
                assert own.push.sequence == worker.sequence + 1


def check_clocks(world: World) -> None:
    """All shards agree who contributed to each clock, and which version it is."""
    for shard in world.shards:
        assert list(shard.finished) == sorted(shard.finished)
        versions = [
            reply.version
            for replies in shard.finished.values()
            for reply in replies.values()
        ]
        assert versions == sorted(versions)
        frontiers = {
            (clock, reply.frontier)
            for clock, replies in shard.finished.items()
            for reply in replies.values()
        }
        assert all(clock == frontier for clock, frontier in frontiers)
    first, *others = world.shards
    for other in others:
        assert other.finished.keys() == first.finished.keys()
        for clock, replies in first.finished.items():
            theirs = other.finished[clock]
            assert theirs.keys() == replies.keys()
            assert {r.version for r in theirs.values()} == {
                r.version for r in replies.values()
            }


def check_snapshots(world: World) -> None:
    """Every image is exactly the clocks up to its cut, on every shard."""
    for snapshot in world.snapshots:
        for shard, image in zip(world.shards, snapshot.images, strict=True):
            assert image.clock == snapshot.clock
            included: set[PushId] = {
                push
                for clock, replies in shard.finished.items()
                if clock <= snapshot.clock
                for push, reply in replies.items()
                if reply.outcome is Outcome.APPLIED
            }
            for index, counts in image.values.items():
                own = {
                    push: count
                    for push, count in shard.values[index].items()
                    if push in included
                }
                assert counts == own
        at_cut = {
            reply.version
            for shard in world.shards
            for reply in shard.finished.get(snapshot.clock, {}).values()
        }
        assert at_cut <= {snapshot.version}


def check_end(world: World) -> None:
    """The last snapshot holds everything, and no image is left that nobody reads."""
    last = world.snapshots[-1]
    assert [image.values for image in last.images] == [s.values for s in world.shards]
    steps = sum(worker.sequence for worker in world.workers.values())
    assert last.version == steps
    assert not any(shard.threads for shard in world.shards)


def run_all(
    block: int, checks: Sequence[Callable[[World], None]], *, loses_workers: bool
) -> None:
    for seed in seeds_of(block):
        world = World(seed, loses_workers=loses_workers)
        try:
            world.run()
            for check in checks:
                check(world)
        except (AssertionError, KeyError, IndexError) as error:
            pytest.fail(
                f"seed {seed} (again with PS_SIM_SEED={seed}): "
                f"{type(error).__name__} {error}\n{world.described()}"
            )


@pytest.mark.parametrize("block", range(BLOCK_COUNT))
def test_every_schedule_keeps_every_promise(block: int) -> None:
    checks = [check_exactly_once, check_clocks, check_snapshots, check_end]
    run_all(block, checks, loses_workers=False)


@pytest.mark.parametrize("block", range(BLOCK_COUNT))
def test_lost_workers_tear_at_most_the_step_they_were_in(block: int) -> None:
    run_all(block, [check_torn_only_once], loses_workers=True)


def test_the_same_seed_gives_the_same_run() -> None:
    def trace() -> list[object]:
        world = World(7)
        world.run()
        return [
            world.records,
            world.snapshots,
            [shard.finished for shard in world.shards],
        ]

    assert trace() == trace()
