"""What workers are told by a shard in every mode, message by message."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from psserver.shard.host import push_session
from psserver.shard.tensors.sent_values import sent_bytes
from pswire.aggregation import BadGradientPolicy
from pswire.membership import (
    Departure,
    FenceKind,
    Member,
    Mode,
    Record,
    StepAtomicity,
)
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, SchemaEntry
from pswire.v1 import membership_pb2, push_pb2
from tests.doubles.core_values import key
from tests.doubles.served_shard import NO_CONTEXT, OpenPush, OpenPushOnce, ServedShard
from tests.refusals import refused
from tests.unit.psserver.shard.rpc.conftest import Make

TWO_PHASE = {"step_atomicity": StepAtomicity.CLOCK}
BACKUPS = {**TWO_PHASE, "backup_worker_count": 1}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls say at once whom they wait for."""
    for module in ("parameter_service", "readiness"):
        monkeypatch.setattr(f"psserver.shard.rpc.{module}.WAITING_INTERVAL_MS", 1)


def raise_bug(*_: object, **__: object) -> None:
    raise RuntimeError("a bug")


def record_without(
    gone: str, *kept: str, mode: Mode = Mode.BSP, last_clock: int = 0
) -> Record:
    """The second record: one worker is evicted after so many pushes."""
    end = Departure(
        member=Member(worker=key(gone), rank=9, base_clock=0),
        last_clock=last_clock,
        evicted=True,
    )
    return Record(
        fence_number=2,
        generation=2,
        kind=FenceKind.MEMBERSHIP,
        members=tuple(
            Member(worker=key(name), rank=rank, base_clock=0)
            for rank, name in enumerate(kept)
        ),
        departures=(end,),
        mode=mode,
    )


async def test_a_clock_of_bsp_brings_its_update_to_all(make: Make) -> None:
    shard = make()
    shard.start("ab")

    first, second = shard.push("a", 1), shard.push("b", 1, {0: 3.0})
    replies = [await first.finished(), await second.finished()]

    assert sorted(first.values) == sorted(second.values) == [(0, 0.0), (1, 0.75)]
    for reply in replies:
        assert (reply.outcome, reply.mode) == (
            push_pb2.OUTCOME_APPLIED,
            membership_pb2.MODE_BSP,
        )
        assert (reply.clock, reply.frontier, reply.staleness) == (1, 1, 0)


async def test_a_step_that_fails_on_the_shard_ends_the_job(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows in the protocol would be waited for without end."""
    shard = make()
    shard.start("ab")
    monkeypatch.setattr(shard.host.model.engine, "apply", raise_bug)

    first, second = shard.push("a", 1), shard.push("b", 1)

    for push in (first, second):
        with refused(ErrorReason.SHARD_LOST, "shard 0 could not carry out a step"):
            await push.finished()
    assert shard.host.end_reason == "shard 0 could not carry out a step"


async def test_a_push_of_asp_brings_what_others_pushed_meanwhile(make: Make) -> None:
    shard = make()
    shard.start("ab", mode=Mode.ASP)

    first = shard.push("a", 1)
    assert (await first.finished()).staleness == 0
    second = shard.push("b", 1, {0: 1.0})
    reply = await second.finished()

    assert sorted(first.values) == [(0, 0.5), (1, 0.5)]
    # B pushed one chunk and gets the other, which A changed, too.
    assert sorted(second.values) == [(0, 0.0), (1, 0.5)]
    assert (reply.staleness, reply.version, reply.mode) == (
        1,
        2,
        membership_pb2.MODE_ASP,
    )


async def test_a_chunk_goes_out_before_the_push_is_complete_and_once(
    make: Make,
) -> None:
    shard = make()
    shard.start("ab", mode=Mode.ASP)
    call = OpenPush(shard)
    call.send(shard.header("a", 1) + shard.trailer([0, 1]))
    call.send(shard.chunk(0, 1.0))
    await call.until_values(1)
    assert call.values == [(0, 0.5)]

    await shard.push("b", 1, {0: 1.0}).finished()
    call.send(shard.chunk(1, 1.0))
    await call.finished()

    # As new as the worker must have it, and not sent again.
    assert call.values == [(0, 0.5), (1, 0.5)]


async def test_an_answer_of_ssp_waits_for_the_slowest_and_has_its_push(
    make: Make, patient: None
) -> None:
    shard = make()
    shard.start("ab", mode=Mode.SSP, bound=1)

    reply = await shard.push("a", 1).finished()
    assert (reply.clock, reply.frontier, reply.staleness_bound) == (1, 0, 1)
    ahead = shard.push("a", 2)
    waiting = await ahead.until_waiting()
    assert [(each.name, each.clock) for each in waiting.awaited] == [("b", 0)]
    assert "staleness bound" in waiting.reason
    assert not ahead.values
    await shard.push("b", 1, {0: 1.0}).finished()

    reply = await ahead.finished()
    assert (reply.clock, reply.frontier) == (2, 1)
    assert sorted(ahead.values) == [(0, -0.5), (1, 0.0)]


async def test_a_pull_of_ssp_waits_for_the_bound(make: Make, patient: None) -> None:
    shard = make()
    shard.start("ab", mode=Mode.SSP, bound=1)
    await shard.push("a", 1).finished()
    shard.push("a", 2)

    pull = shard.pull("a", 2)
    await pull.until_waiting()
    assert not pull.values
    await shard.push("b", 1, {}).finished()

    reply = await pull.finished()
    assert (reply.mode, reply.frontier) == (membership_pb2.MODE_SSP, 1)
    # A pull brings what never changes, too.
    assert sorted(pull.values) == [(0, 0.0), (1, 0.0), (2, 1.0)]


async def test_a_slow_reader_of_asp_is_given_the_newest_values(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_session, "QUEUED_BYTES_MAX", 0)
    shard = make()
    shard.start("ab", mode=Mode.ASP)
    slow = OpenPush(shard)
    slow.is_read.clear()
    slow.send(shard.header("a", 1) + shard.trailer([0, 1]))
    for chunk_index in (1, 0):
        slow.send(shard.chunk(chunk_index, 1.0))
    await shard.until(lambda: shard.host.model.core.closed_sequence(key("a")) == 1)
    await shard.push("b", 1).finished()

    slow.is_read.set()
    await slow.finished()

    # Chunk 1 was made for the reader before B pushed, chunk 0 only remembered.
    assert slow.values == [(1, 0.5), (0, 0.0)]


async def test_a_call_that_broke_is_told_all_again(make: Make) -> None:
    shard = make(**TWO_PHASE)
    shard.start("a")
    first = shard.push("a", 1)
    await first.until_staged()

    second = shard.push("a", 1)
    await second.until_staged()

    assert second.staged == [(1, ["a"])]
    with refused(ErrorReason.DRAINING):
        await first.finished()
    assert await shard.commit("a", 1, ["a"])
    await second.finished()
    assert sorted(second.values) == [(0, 0.5), (1, 0.5)]


@pytest.mark.parametrize("is_member", [True, False])
async def test_a_push_that_is_done_is_answered_though_its_segment_is_gone(
    make: Make, *, is_member: bool
) -> None:
    """As of a worker that stood still while its clock closed and it was evicted."""
    shard = make()
    shard.start("ab")
    calls = [shard.push(name, 1) for name in "ab"]
    for call in calls:
        await call.finished()
    if not is_member:
        shard.host.install_record(record_without("a", "b", last_clock=1))

    again = OpenPushOnce(
        shard,
        shard.header("a", 1)
        + shard.shared_chunk(0, 1.0, segment=9)
        + shard.shared_chunk(1, 1.0, segment=9)
        + shard.trailer((0, 1)),
    )
    assert (await again.finished()).outcome == push_pb2.OUTCOME_DUPLICATE


async def test_a_chunk_that_is_here_is_not_looked_up_again(make: Make) -> None:
    shard = make()
    shard.start("ab")
    first = OpenPush(shard)
    first.send(shard.header("a", 1) + shard.trailer((0, 1)))
    first.send(shard.chunk(1, 1.0))
    window = shard.host.model.core.on_shard.window_of(key("a"))
    await shard.until(lambda: 1 in window.entries and bool(window.entries[1].digests))

    again = OpenPush(shard)
    again.send(shard.header("a", 1) + shard.shared_chunk(1, 1.0, segment=9))
    again.send(shard.trailer((0, 1)) + shard.chunk(0, 1.0))
    other = shard.push("b", 1)

    assert (await again.finished()).outcome == push_pb2.OUTCOME_APPLIED
    await other.finished()


async def test_a_chunk_in_a_segment_that_is_gone_is_to_be_sent_again(
    make: Make,
) -> None:
    shard = make()
    shard.start("ab")
    lost = OpenPush(shard)
    lost.send(
        shard.header("a", 1)
        + shard.trailer((0, 1))
        + shard.shared_chunk(1, 1.0, segment=9)
    )
    with refused(ErrorReason.SEGMENT_GONE, "has lost with its membership"):
        await lost.finished()

    again, other = shard.push("a", 1), shard.push("b", 1)
    await again.finished()
    await other.finished()
    assert sorted(again.values) == [(0, 0.5), (1, 0.5)]


async def test_nothing_is_applied_before_a_commit_by_any_of_them(make: Make) -> None:
    shard = make(**TWO_PHASE)
    shard.start("ab")
    calls = [shard.push("a", 1), shard.push("b", 1)]
    for call in calls:
        await call.until_staged()
        assert call.staged == [(1, ["a", "b"])]
        assert not call.values

    assert await shard.commit("b", 1, ["a", "b"])

    for call in calls:
        await call.finished()
        assert sorted(call.values) == [(0, 0.5), (1, 0.5)]
    assert await shard.commit("a", 1, ["a", "b"])


async def test_a_commit_of_others_is_refused_and_told_again(make: Make) -> None:
    shard = make(**TWO_PHASE)
    shard.start("ab")
    calls = [shard.push("a", 1), shard.push("b", 1)]
    for call in calls:
        await call.until_staged()

    assert not await shard.commit("a", 1, ["a"])

    for call in calls:
        await call.until_staged(2)
        assert call.staged == [(1, ["a", "b"])] * 2
        assert call.reply is None


async def test_asp_commits_a_push_by_itself(make: Make) -> None:
    shard = make(**TWO_PHASE)
    shard.start("ab", mode=Mode.ASP)
    call = shard.push("a", 1)
    await call.until_staged()
    assert call.staged == [(1, ["a"])]
    assert not call.values

    assert await shard.commit("a", 1, ["a"])

    await call.finished()
    assert sorted(call.values) == [(0, 0.5), (1, 0.5)]


async def test_a_commit_is_held_while_the_shard_is_frozen(make: Make) -> None:
    shard = make(**TWO_PHASE)
    shard.start("a")
    call = shard.push("a", 1)
    await call.until_staged()
    shard.host.prepare_fence(2, FenceKind.MEMBERSHIP)

    commit = asyncio.create_task(shard.commit("a", 1, ["a"]))
    assert await shard.done_sequence("a") == 0
    assert not commit.done()
    shard.host.abort_fence(2)

    assert await commit
    await call.finished()


@pytest.mark.parametrize("method", ["commit", "ready"])
async def test_who_is_taken_out_drives_nothing(make: Make, method: str) -> None:
    shard = make(**BACKUPS)
    shard.start("ab")
    call = shard.push("a", 1)
    await call.until_staged()
    shard.host.prepare_fence(2, FenceKind.MEMBERSHIP, evicting=[key("a")])
    work = shard.commit("a", 1, ["a"]) if method == "commit" else shard.ready("a", 1)
    held = asyncio.create_task(work)
    assert await shard.done_sequence("a") == 0
    assert not held.done()

    shard.host.install_record(record_without("a", "b"))

    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        await held
    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        await call.finished()


async def test_backup_workers_leave_the_slowest_out(make: Make) -> None:
    shard = make(**BACKUPS)
    shard.start("abc")
    fast = [shard.push("a", 1), shard.push("b", 1, {0: 3.0})]
    for call in fast:
        await call.until_staged()
        assert call.staged == [(1, [])]

    chosen = asyncio.gather(shard.ready("a", 1), shard.ready("b", 1))
    assert await chosen == [["a", "b"]] * 2
    assert await shard.commit("a", 1, ["a", "b"])
    for call in fast:
        assert (await call.finished()).outcome == push_pb2.OUTCOME_APPLIED
        assert sorted(call.values) == [(0, 0.0), (1, 0.75)]

    late = shard.push("c", 1)
    reply = await late.finished()
    assert (reply.outcome, reply.clock) == (push_pb2.OUTCOME_DROPPED, 1)
    assert not late.values
    # It learns, too, that it has nothing to commit.
    assert await shard.ready("c", 1) == ["a", "b"]


async def test_a_commit_for_others_after_a_change_of_mode_ends_no_script(
    make: Make,
) -> None:
    """In mode quorum any worker drives it; another one was faster."""
    shard = make()
    record = shard.start("ab", mode=Mode.QUORUM)
    first, other = shard.push("a", 1), shard.push("b", 1)
    for call in (first, other):
        await call.until_staged()
    assert await shard.ready("a", 1) == ["a"]
    assert await shard.commit("a", 1, ["a"])
    assert (await first.finished()).outcome == push_pb2.OUTCOME_APPLIED

    changed = replace(record, generation=2, fence_number=2, kind=FenceKind.MODE)
    shard.host.install_record(replace(changed, mode=Mode.BSP))
    assert await shard.commit("b", 1, ["a"])


async def test_all_calls_are_held_while_the_coordinator_is_silent(
    make: Make, patient: None
) -> None:
    shard = make()
    shard.start("a")
    shard.host.set_silent(0)

    call = shard.push("a", 1)
    waiting = await call.until_waiting()
    assert waiting.reason == (
        "the coordinator, which has been silent for longer than a lease"
    )
    shard.host.set_silent(None)

    assert (await call.finished()).outcome == push_pb2.OUTCOME_APPLIED


async def test_an_idle_worker_is_asked_by_the_number_of_its_push(make: Make) -> None:
    shard = make()
    shard.start("ab")
    request = shard.request("AwaitContribution", "b", clock=1, sequence=1)

    asked = asyncio.create_task(shard.service.await_contribution(request, NO_CONTEXT))
    call = shard.push("a", 1)

    answer = await asked
    assert (answer.clock, answer.optimizer) == (1, "optimizer")
    await shard.push("b", 1, {}).finished()
    await call.finished()


def sent_to(shard: ServedShard) -> int:
    """Bytes that are kept of what workers were sent."""
    return sent_bytes(each.sent for each in shard.host.members if each.sent)


async def test_what_is_kept_for_a_worker_goes_with_it(make: Make) -> None:
    shard = make(delay_compensation=0.5)
    shard.start("ab", mode=Mode.ASP)
    seeded = sent_to(shard)
    await shard.pull("b", 0).finished()
    assert sent_to(shard) == 2 * seeded > 0
    request = shard.request("AwaitContribution", "b", sequence=1)
    idle = asyncio.create_task(shard.service.await_contribution(request, NO_CONTEXT))
    await shard.until(lambda: shard.host.members.of(key("b")).idle is not None)

    shard.host.install_record(record_without("b", "a", mode=Mode.ASP))

    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        await idle
    assert sent_to(shard) == seeded
    assert [member.worker for member in shard.host.members] == [key("a")]


async def test_a_late_gradient_is_compensated_by_hand(make: Make) -> None:
    """All start from 1, the seeder A too. The rate is 0.5, the strength 0.25."""
    shard = make(delay_compensation=0.25)
    shard.start("ab", mode=Mode.ASP)
    await shard.pull("b", 0).finished()

    first = shard.push("a", 1, {0: 2.0})
    await first.finished()
    second = shard.push("b", 1, {0: 4.0})
    await second.finished()
    third = shard.push("a", 2, {0: -2.0})
    await third.finished()

    # 1 - 0.5 * 2.
    assert dict(first.values)[0] == 0.0
    # B has 1, the shard has 0: 0 - 0.5 * (4 + 0.25 * 16 * (0 - 1)).
    assert dict(second.values)[0] == 0.0
    # A has 0: 0 - 0.5 * -2.
    assert dict(third.values)[0] == 1.0


async def test_a_stale_push_moves_the_values_less(make: Make) -> None:
    shard = make(is_staleness_scaled=True)
    shard.start("abc", mode=Mode.ASP)
    for name in "ab":
        await shard.push(name, 1, {0: 1.0}).finished()

    call = shard.push("c", 1, {0: 1.0})

    assert (await call.finished()).staleness == 2
    # 1 - 0.5 - 0.5 - 0.5 / 2.
    assert dict(call.values)[0] == -0.25


async def test_a_push_that_says_too_small_a_norm_has_no_more_than_the_largest(
    make: Make,
) -> None:
    shard = make(gradient_norm_max=6.0, bad_gradient_policy=BadGradientPolicy.CLIP)
    shard.start("ab", mode=Mode.ASP)
    # Of norm 5 each, 7 together; the push says 0.
    first = shard.push("a", 1, {0: 2.5, 1: 5 / 2**0.5})
    await first.finished()
    second = shard.push("b", 1, {0: 4.0})
    await second.finished()

    moved = [value != 1.0 for _, value in sorted(first.values) if _ < 2]
    assert sorted(moved) == [False, True]
    held = shard.host.model.engine.vectors.view(0)
    assert float(held[0]) in (1.0, -0.25)
    liars = {m.worker.worker_id for m in shard.host.members if m.has_contradicted}
    assert liars == {"a", "b"}


async def test_other_calls_are_answered_while_a_large_chunk_is_read() -> None:
    count = 1 << 18
    entries = [
        SchemaEntry(name="large", shape=(count,), element_type=ElementType.FLOAT32)
    ]
    with ServedShard(entries) as shard:
        shard.start("a")
        lock = shard.host.model.engine._locks[0]
        lock.acquire()
        try:
            pull = shard.pull("a", 0)
            assert await shard.done_sequence("a") == 0
            assert not pull.values
        finally:
            lock.release()
        await pull.finished()
        assert pull.values == [(0, 1.0)]


async def test_a_push_in_one_message_brings_its_update_and_its_reply(
    make: Make,
) -> None:
    shard = make()
    shard.start("a")

    call = shard.push_once("a", 1)
    reply = await call.finished()

    assert call.values == [(0, 0.5)]
    assert (reply.outcome, reply.clock) == (push_pb2.OUTCOME_APPLIED, 1)
    again = await shard.push_once("a", 1).finished()
    assert again.outcome == push_pb2.OUTCOME_DUPLICATE


@pytest.mark.usefixtures("patient")
async def test_a_push_in_one_message_that_waits_goes_on_by_a_stream(
    make: Make,
) -> None:
    shard = make()
    shard.start("ab")

    call = shard.push_once("a", 1)
    await call.ended()

    assert call.reply is None
    assert [each.name for each in call.waiting[0].awaited] == ["b"]
    stream = OpenPush(shard)
    stream.send(shard.header("a", 1) + shard.trailer({0: 1.0}))
    other = shard.push("b", 1, {0: 1.0})
    assert (await stream.finished()).outcome == push_pb2.OUTCOME_APPLIED
    assert stream.values == [(0, 0.5)]
    assert (await other.finished()).clock == 1


async def test_a_push_in_one_message_that_needs_a_commit_says_so(make: Make) -> None:
    shard = make(**TWO_PHASE)
    shard.start("a")

    call = shard.push_once("a", 1)
    await call.ended()

    assert (call.reply, call.staged) == (None, [(1, ["a"])])
    assert await shard.commit("a", 1, ["a"])
    again = shard.push_once("a", 1)
    await again.ended()
    assert (again.reply, again.staged) == (None, [(1, ["a"])])  # others may need it
    assert await shard.done_sequence("a") == 1


async def test_pushes_go_on_one_call_that_rests_between_them(make: Make) -> None:
    shard = make()
    shard.start("a")
    queue: asyncio.Queue[bytes] = asyncio.Queue()

    async def requests() -> AsyncIterator[bytes]:
        while True:
            yield await queue.get()

    answers = shard.service.push_pull_once(requests(), NO_CONTEXT)
    for sequence in (1, 2):
        queue.put_nowait(shard.whole_push("a", sequence))
        await anext(answers)
        assert await shard.done_sequence("a") == sequence
    resting = asyncio.ensure_future(anext(answers))
    await asyncio.sleep(0)

    shard.host.close()

    with pytest.raises(Refusal, match="the shard is shutting down"):
        await resting
    late = shard.service.push_pull_once(requests(), NO_CONTEXT)
    assert [answer async for answer in late] == []
