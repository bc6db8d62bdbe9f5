import asyncio
import dataclasses

import pytest

from pswire.membership import Departure, FenceKind, Member, Record, WorkerKey
from psworker.errors import (
    EvictedError,
    JobEndedError,
    JobFailedError,
    StalenessError,
)
from psworker.member.core import Seed
from psworker.member.membership import Membership
from psworker.transport.values import (
    JobEnd,
    SeedOrder,
    ShardAddress,
    ShardMap,
    Waiting,
    WorkerView,
)

ME = WorkerKey("w0", 2)
OTHER = WorkerKey("w1", 1)
SHARDS = (ShardAddress(0, "h:1", 1),)


def member(worker: WorkerKey, rank: int = 0) -> Member:
    return Member(worker=worker, rank=rank, base_clock=7)


def eviction(worker: WorkerKey) -> Departure:
    return Departure(member=member(worker), last_clock=9, evicted=True)


def record(generation: int, *workers: WorkerKey, departed: bool = False) -> Record:
    return Record(
        fence_number=generation,
        generation=generation,
        kind=FenceKind.MEMBERSHIP,
        members=tuple(member(each, rank) for rank, each in enumerate(workers)),
        departures=(eviction(ME),) if departed else (),
    )


async def test_a_view_tells_shards_and_place() -> None:
    membership = Membership(ME)

    membership.take(WorkerView(record(1, OTHER, ME), SHARDS))

    assert membership.shards == SHARDS
    assert membership.member == member(ME, 1)


async def test_a_view_of_a_job_that_starts_again_leaves_no_record() -> None:
    """It has returned to a checkpoint: who waits to join asks shards for nothing."""
    waiting, evicted = Membership(ME), Membership(OTHER)
    for membership in (waiting, evicted):
        membership.take(WorkerView(record(3, OTHER), SHARDS))

    for membership in (waiting, evicted):
        membership.take(WorkerView(None, ()))

    assert (waiting.record, waiting.shards) == (None, ())
    assert evicted.record == record(3, OTHER), "its own eviction says what became of it"


async def test_an_earlier_start_under_the_same_id_is_not_this_worker() -> None:
    membership = Membership(ME)

    membership.take(record(1, WorkerKey("w0", 1)))

    assert membership.member is None
    assert membership.failure is None


async def test_an_older_record_changes_nothing() -> None:
    membership = Membership(ME)
    membership.take(record(5, ME))

    membership.take(record(4, OTHER))

    assert membership.record == record(5, ME)
    assert membership.failure is None


async def test_a_wait_ends_with_the_next_event() -> None:
    membership = Membership(ME)
    waiting = asyncio.ensure_future(membership.wait_change())
    await asyncio.sleep(0)
    assert not waiting.done()

    membership.take(Waiting(0, 5000, "w1 to join", ()))
    await waiting

    assert str(membership.waiting) == "w1 to join"


async def test_a_wait_hears_what_comes_before_its_task_first_runs() -> None:
    membership = Membership(ME)
    waiting = asyncio.ensure_future(membership.wait_change())

    membership.take(SeedOrder(3, SHARDS))

    await asyncio.wait_for(waiting, timeout=30)


async def test_an_order_to_seed_brings_the_shard_map() -> None:
    membership = Membership(ME)

    membership.take(SeedOrder(3, SHARDS))

    assert membership.core.next_to_join() == Seed(SeedOrder(3, SHARDS))
    assert membership.shards == SHARDS


async def test_who_does_not_seed_hears_where_the_shards_are() -> None:
    membership = Membership(ME)

    membership.take(ShardMap(SHARDS))

    assert membership.core.next_to_join() is None
    assert membership.shards == SHARDS
    assert membership.core.view_count == 0


async def test_a_member_that_was_lost_is_told_to_the_others_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    third = WorkerKey("w2", 1)
    membership = Membership(ME)
    membership.take(record(1, ME, OTHER, third))

    for generation in (2, 3):
        end = eviction(third)
        gone = record(generation, ME, OTHER)
        membership.take(dataclasses.replace(gone, departures=(end,)))

    assert caplog.messages == [
        "worker w2 (start 1) was lost after clock 9: the job goes on with the 2 "
        "workers left in generation 2"
    ]


async def test_who_joins_is_not_told_of_losses_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    membership = Membership(ME)
    end = eviction(OTHER)

    membership.take(dataclasses.replace(record(5, ME), departures=(end,)))
    membership.take(dataclasses.replace(record(6, ME), departures=(end,)))

    assert caplog.messages == []


async def test_a_generation_is_waited_for() -> None:
    membership = Membership(ME)
    membership.take(record(1, ME))
    waiting = asyncio.ensure_future(membership.wait_generation(3))

    membership.take(record(2, ME))
    await asyncio.sleep(0)
    assert not waiting.done()
    membership.take(record(4, ME))

    await waiting
    await membership.wait_generation(4)
    assert membership.generation == 4


async def test_a_record_without_a_member_evicts_it() -> None:
    membership = Membership(ME)
    membership.take(record(1, ME, OTHER))
    blocked = asyncio.ensure_future(membership.unless_failed(asyncio.Event().wait()))
    await asyncio.sleep(0)

    membership.take(record(2, OTHER, departed=True))

    with pytest.raises(EvictedError, match="after clock 9"):
        await blocked


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        (JobEnd(True, "shard 1 is lost"), JobFailedError, "failed: shard 1 is lost"),
        (JobEnd(False, ""), JobEndedError, "over: it finished"),
    ],
)
async def test_the_end_of_the_job_ends_every_call_now_and_later(
    end: JobEnd, kind: type[JobEndedError], text: str
) -> None:
    membership = Membership(ME)
    blocked = asyncio.ensure_future(membership.unless_failed(asyncio.Event().wait()))
    await asyncio.sleep(0)

    membership.take(end)

    with pytest.raises(kind, match=text):
        await blocked
    with pytest.raises(kind, match=text):
        await membership.unless_failed(asyncio.Event().wait())


async def test_a_broken_promise_that_a_call_finds_ends_every_call() -> None:
    membership = Membership(ME)
    blocked = asyncio.ensure_future(membership.unless_failed(asyncio.Event().wait()))
    await asyncio.sleep(0)

    async def find() -> None:
        raise StalenessError("beyond the bound")

    with pytest.raises(StalenessError):
        await membership.unless_failed(find())
    with pytest.raises(StalenessError):
        await blocked
    assert isinstance(membership.failure, StalenessError)


async def test_a_result_that_is_there_counts_and_no_task_is_left() -> None:
    membership = Membership(ME)

    async def work() -> int:
        return 3

    assert await membership.unless_failed(work()) == 3
    assert asyncio.all_tasks() == {asyncio.current_task()}
