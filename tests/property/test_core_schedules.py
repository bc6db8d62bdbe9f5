"""Promises that hold in every schedule, tried on many that are drawn.

`PS_SIM_SCHEDULES=5000 pytest tests/property/test_core_schedules.py` tries more;
`PS_SIM_SEED=1234` tries one.
"""

import os
import traceback
from collections.abc import Callable, Iterator, Sequence

import pytest

from psserver.core.fence_series import NUMBERS_PER_START
from psserver.core.push import Outcome, PushId, Reply
from psserver.core.record import WorkerKey
from pswire.reasons import Refusal
from tests.doubles.simulated_shard import SimulatedShard
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


def closed_steps(world: World) -> dict[WorkerKey, int]:
    """Of each worker, how many of its pushes count."""
    return {
        end.member.worker: end.step_count
        for record in world.coordinator.records
        for end in record.departures
    }


def check_exactly_once(world: World) -> None:
    """Each push that counts is in every chunk it has exactly once, or was skipped.

    Of others, at most the one that a lost worker was in the middle of is anywhere.
    """
    closed = closed_steps(world)
    for worker in world.workers.values():
        assert worker.sequence <= closed.get(worker.key, 0)
        for own in worker.pushes.values():
            counts = {
                world.shards[shard_index].values[chunk_index][own.push]
                for shard_index, chunk_index in chunks_of(world, own)
            }
            if own.push.sequence <= closed.get(worker.key, 0):
                assert counts <= {0 if is_skipped(world, own) else 1}
            else:
                assert counts <= {0, 1}
                assert worker.key in world.lost
                assert own.push.sequence == worker.sequence + 1


def is_skipped(world: World, own: OwnPush) -> bool:
    """All shards say the same of a push that counts."""
    outcomes = {s.finished[own.clock][own.push].outcome for s in world.shards}
    (outcome,) = outcomes
    return outcome is Outcome.SKIPPED


def check_acknowledgements(world: World) -> None:
    """What a worker was told is what happened."""
    for worker in world.workers.values():
        for own in worker.acknowledged:
            is_told_so = worker.outcome_of(own) is Outcome.SKIPPED
            assert is_told_so == is_skipped(world, own)


def counted(world: World, shard: SimulatedShard) -> dict[int, dict[PushId, Reply]]:
    """What a shard finished, without pushes that were thrown away later."""
    closed = closed_steps(world)
    return {
        clock: {p: r for p, r in replies.items() if p.sequence <= closed[p.worker]}
        for clock, replies in shard.finished.items()
    }


def check_clocks(world: World) -> None:
    """All shards agree who contributed to each clock, and which version it is."""
    first, *others = [counted(world, shard) for shard in world.shards]
    for other in others:
        for clock in first.keys() | other.keys():
            mine, theirs = first.get(clock, {}), other.get(clock, {})
            assert mine.keys() == theirs.keys()
            # A step that was torn counts in the version until its worker is closed.
            if not any(clock in torn_clocks(world, s) for s in world.shards):
                assert {r.version for r in mine.values()} == {
                    r.version for r in theirs.values()
                }
    for shard in world.shards:
        assert list(shard.finished) == sorted(shard.finished)
        for clock, replies in shard.finished.items():
            assert {reply.frontier for reply in replies.values()} == {clock}


def torn_clocks(world: World, shard: SimulatedShard) -> set[int]:
    """Clocks with a push that was thrown away after this shard had finished it."""
    kept = counted(world, shard)
    return {c for c, replies in shard.finished.items() if len(replies) > len(kept[c])}


def check_versions(world: World) -> None:
    """Versions never go back."""
    for shard in world.shards:
        versions = [
            reply.version
            for replies in shard.finished.values()
            for reply in replies.values()
        ]
        assert versions == sorted(versions)


def check_snapshots(world: World) -> None:
    """Every image is exactly the clocks up to its cut, on every shard."""
    for snapshot in world.coordinator.snapshots:
        for shard, image in zip(world.shards, snapshot.images, strict=True):
            assert image.clock == snapshot.clock
            finished = counted(world, shard)
            for clock, replies in finished.items():
                is_in = clock <= snapshot.clock
                for push in replies:
                    for index, counts in image.values.items():
                        now = shard.values[index][push]
                        assert counts[push] == (now if is_in else 0)
            if not torn_clocks(world, shard):
                versions = {
                    reply.version for reply in finished.get(snapshot.clock, {}).values()
                }
                assert versions <= {snapshot.version}


def check_end(world: World) -> None:
    """The last snapshot holds everything, and no image is left that nobody reads."""
    last = world.coordinator.snapshots[-1]
    assert [image.values for image in last.images] == [s.values for s in world.shards]
    assert last.version == sum(closed_steps(world).values())
    newest = world.coordinator.core.snapshots.newest
    assert newest is not None
    for shard in world.shards:
        first_id = newest.snapshot_id // NUMBERS_PER_START * NUMBERS_PER_START
        kept = [number for number in shard.images if number > first_id]
        assert kept == [newest.snapshot_id]
        assert not shard.threads


PROMISES = (
    check_exactly_once,
    check_acknowledgements,
    check_clocks,
    check_snapshots,
    check_end,
)


def run_all(
    block: int,
    checks: Sequence[Callable[[World], None]],
    *,
    loses_workers: bool = False,
    restarts_coordinator: bool = False,
) -> None:
    for seed in seeds_of(block):
        world = World(
            seed,
            loses_workers=loses_workers,
            restarts_coordinator=restarts_coordinator,
        )
        try:
            world.run()
            for check in checks:
                check(world)
        except (AssertionError, LookupError, Refusal) as error:
            traceback.print_exc()
            pytest.fail(
                f"seed {seed} (again with PS_SIM_SEED={seed}): "
                f"{type(error).__name__} {error}\n{world.described()}"
            )


@pytest.mark.parametrize("block", range(BLOCK_COUNT))
def test_every_schedule_keeps_every_promise(block: int) -> None:
    run_all(block, (*PROMISES, check_versions))


@pytest.mark.parametrize("block", range(BLOCK_COUNT))
def test_lost_workers_tear_at_most_the_step_they_were_in(block: int) -> None:
    run_all(block, PROMISES, loses_workers=True)


@pytest.mark.parametrize("block", range(BLOCK_COUNT))
def test_a_coordinator_that_is_started_again_breaks_no_promise(block: int) -> None:
    run_all(block, PROMISES, restarts_coordinator=True, loses_workers=block % 2 == 1)


def test_the_same_seed_gives_the_same_run() -> None:
    def trace() -> list[object]:
        world = World(7, loses_workers=True, restarts_coordinator=True)
        world.run()
        return [
            world.coordinator.records,
            world.coordinator.snapshots,
            [shard.finished for shard in world.shards],
        ]

    assert trace() == trace()
