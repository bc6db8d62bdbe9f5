"""Chunks ahead of a trailer: replaceable, counted by nobody, gone with their call."""

import asyncio

import pytest

from psserver.edge.fence_report import FenceReport
from psserver.edge.limits import Limits
from psserver.shard.core.shard import ShardCore
from pswire.membership import (
    Departure,
    FenceKind,
    Member,
    Mode,
    Record,
    StepAtomicity,
)
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import push_pb2
from tests.doubles.core_values import key
from tests.doubles.served_shard import OpenPush, ServedShard
from tests.refusals import refused
from tests.unit.psserver.shard.rpc.conftest import Make


def core_of(shard: ServedShard) -> ShardCore:
    return shard.host.model.core


async def sent_ahead(
    shard: ServedShard, name: str, sequence: int, *chunks: tuple[int, float]
) -> OpenPush:
    """A call that has sent these chunks and no trailer, once the shard has them."""
    call = OpenPush(shard)
    call.send(shard.header(name, sequence))
    for chunk_index, value in chunks:
        call.send(shard.chunk(chunk_index, value))
    sizes = [shard.host.model.chunks[index].byte_count for index, _ in chunks]
    await shard.until(lambda: shard.ahead_bytes >= sum(sizes))
    return call


async def settled(shard: ServedShard) -> None:
    """Returns once the shard's calls have taken what was sent to them."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("atomicity", list(StepAtomicity))
async def test_the_trailer_makes_a_push_of_what_went_ahead(
    make: Make, mode: Mode, atomicity: StepAtomicity
) -> None:
    shard = make(step_atomicity=atomicity)
    shard.start("a", mode=mode)
    call = await sent_ahead(shard, "a", 1, (1, 1.0), (0, 2.0))
    assert core_of(shard).on_shard.window_of(key("a")).next_entry is None

    call.send(shard.trailer([0, 1]))
    if atomicity is StepAtomicity.CLOCK or mode.rules.has_quorum:
        await call.until_staged()
        assert await shard.commit("a", 1, "a")

    assert (await call.finished()).outcome == push_pb2.OUTCOME_APPLIED
    assert sorted(call.values) == [(0, 0.0), (1, 0.5)]
    assert shard.ahead_bytes == 0


async def test_a_later_chunk_replaces_an_earlier_one_and_one_left_out_is_dropped(
    make: Make,
) -> None:
    shard = make()
    shard.start("a")
    call = await sent_ahead(shard, "a", 1, (1, 1.0), (0, 2.0))
    held = shard.ahead_bytes
    call.send(shard.chunk(0, 1.0))
    await settled(shard)
    assert shard.ahead_bytes == held

    call.send(shard.trailer([0]))
    await call.finished()

    assert call.values == [(0, 0.5)]


async def test_values_come_in_the_order_of_the_next_forward_pass(make: Make) -> None:
    shard = make()
    shard.start("a")
    call = await sent_ahead(shard, "a", 1, (1, 1.0), (0, 1.0))

    call.send(shard.trailer([0, 1]))
    await call.finished()

    assert [index for index, _ in call.values] == [0, 1]


async def test_chunks_go_with_their_call(make: Make) -> None:
    shard = make()
    shard.start("a")
    call = await sent_ahead(shard, "a", 1, (1, 7.0))

    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)
    assert shard.ahead_bytes == 0
    again = shard.push("a", 1, {0: 1.0})
    await again.finished()

    assert again.values == [(0, 0.5)]


async def test_a_worker_that_sends_ahead_twice_costs_one_gradient(make: Make) -> None:
    shard = make()
    shard.start("a")
    first = await sent_ahead(shard, "a", 1, (0, 7.0))
    held = shard.ahead_bytes
    second = await sent_ahead(shard, "a", 1, (0, 1.0))

    with refused(ErrorReason.DRAINING, "a newer call sends ahead"):
        await first.finished()
    assert shard.ahead_bytes == held

    second.send(shard.trailer([0]))
    await second.finished()
    assert second.values == [(0, 0.5)]


async def test_a_call_that_idles_is_told_nothing_and_not_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("parameter_service", "readiness"):
        monkeypatch.setattr(f"psserver.shard.rpc.{module}.WAITING_INTERVAL_MS", 1)
    shard = make(limits=Limits(message_s=0.02))
    shard.start("a")
    call = await sent_ahead(shard, "a", 1, (0, 1.0))

    await asyncio.sleep(0.1)

    assert not call.task.done()
    assert not call.waiting
    # Nor does the shard say that it waits for anybody because of it.
    assert shard.host.members.oldest_ms is None
    call.send(shard.trailer([0]))
    await call.finished()


async def test_a_worker_that_has_sent_ahead_may_still_be_without_data(
    make: Make,
) -> None:
    shard = make()
    shard.start("ab")
    waiting = asyncio.ensure_future(shard.host.await_contribution(key("b"), 1))
    await settled(shard)
    # The header may overtake the question, and come behind it.
    call = await sent_ahead(shard, "b", 1, (0, 1.0))
    first = shard.push("a", 1, {0: 1.0})

    asked = await asyncio.wait_for(waiting, 30)

    assert asked.clock == 1
    assert not first.task.done()
    nothing = shard.push("b", 1, {})
    await first.finished()
    await nothing.finished()
    assert first.values == [(0, 0.75)]
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)


async def test_a_report_does_not_know_of_what_went_ahead(make: Make) -> None:
    shard = make()
    shard.start("ab")
    call = await sent_ahead(shard, "b", 1, (0, 1.0), (1, 1.0))

    while not shard.host.outbox.empty():
        shard.host.outbox.get_nowait()
    shard.host.prepare_fence(2, FenceKind.MEMBERSHIP)
    report = await asyncio.wait_for(shard.host.outbox.get(), 30)

    assert isinstance(report, FenceReport)
    assert report.trailer_clock_max == 0
    assert {h.complete_sequence for h in report.holdings} == {0}
    assert core_of(shard).queued_push_count == 0
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)


async def test_a_record_ends_the_call_of_who_is_no_member_any_more(make: Make) -> None:
    shard = make()
    shard.start("ab")
    call = await sent_ahead(shard, "b", 1, (0, 7.0))
    end = Departure(
        member=Member(worker=key("b"), rank=1, base_clock=0),
        last_clock=0,
        evicted=True,
    )
    shard.host.install_record(
        Record(
            fence_number=2,
            generation=2,
            kind=FenceKind.MEMBERSHIP,
            members=(Member(worker=key("a"), rank=0, base_clock=0),),
            departures=(end,),
        )
    )

    with pytest.raises(Refusal, match="is no member any more; what it sent ahead"):
        await call.finished()
    assert shard.ahead_bytes == 0


@pytest.mark.parametrize(
    ("sequence", "clock", "text"),
    [(3, 3, "came after push 0"), (1, 5, "is of clock 1")],
)
async def test_a_push_that_could_not_count_is_refused_before_its_chunks(
    make: Make, monkeypatch: pytest.MonkeyPatch, sequence: int, clock: int, text: str
) -> None:
    monkeypatch.setattr("psserver.shard.rpc.push_call.REFUSED_REST_TIMEOUT_S", 0.01)
    shard = make()
    shard.start("a")
    call = OpenPush(shard)
    call.send(shard.header("a", sequence, clock=clock))

    with pytest.raises(Refusal, match=text):
        await call.finished()
