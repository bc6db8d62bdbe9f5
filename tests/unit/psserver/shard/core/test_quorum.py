"""When a clock of mode quorum closes, and with whom, on one shard."""

from dataclasses import replace

import pytest

from psserver.shard.core.clock_commits import proof_of_choice
from psserver.shard.core.effects import ApplyChunk, ClockClosed, WakeAt
from psserver.shard.core.push import PushId
from psserver.shard.core.quorum import LAST_PUSH_WAIT_MS, Arrival, closes_at_ms
from psserver.shard.core.shard_state import ShardRules
from pswire.aggregation import proof_of
from pswire.membership import Mode, ModeTerms, Outcome, Record, WorkerKey
from tests.doubles.core_values import (
    choice,
    chosen_by_first,
    chunk,
    departure,
    key,
    push_id,
    record,
    trailer,
)
from tests.doubles.driven_shard import DrivenShard

NAMES = "abcd"


def terms(generation: int = 1, names: str = NAMES, **values: int) -> Record:
    """A record of these members in mode quorum."""
    found = record(dict.fromkeys(names, 0), generation=generation, mode=Mode.QUORUM)
    return replace(found, **values)  # type: ignore[arg-type]


def first_shard() -> DrivenShard:
    return DrivenShard({}, [0], rules=ShardRules(is_first=True))


def shard_with(quorum: int, window_ms: int = 0, names: str = NAMES) -> DrivenShard:
    shard = first_shard()
    shard.install(terms(names=names, quorum=quorum, grace_window_ms=window_ms))
    return shard


def come(
    shard: DrivenShard,
    name: str,
    now_ms: int,
    sequence: int = 1,
    weight: float = 1.0,
    slack_ms: int | None = None,
    is_last: bool = False,
) -> None:
    """A worker pushes, and says that every shard holds all of it."""
    push = PushId(key(name), sequence)
    chunks = [0] if weight else []
    if is_last:
        begin(shard, name, now_ms, sequence)
        entry = shard.core.on_shard.of(key(name)).window.open(sequence)
        assert entry is not None
    else:
        entry = shard.open(push, now_ms)
    what = replace(trailer(chunks, weight=weight), slack_ms=slack_ms)
    shard.core.add_trailer(push, entry, what)
    for index in chunks:
        shard.core.add_chunk(push, entry, index, chunk(f"{push}"))
    shard.core.ready(key(name), sequence, now_ms)


def chosen(shard: DrivenShard, name: str, sequence: int = 1) -> str | None:
    """Names of those that the clock consists of, None while it is open."""
    found = shard.core.choice_for(key(name), sequence)
    return None if found is None else "".join(w.worker_id for w in found.workers)


def test_a_clock_closes_with_as_many_as_the_quorum_says() -> None:
    shard = shard_with(2)
    come(shard, "c", 5)
    assert chosen(shard, "c") is None
    come(shard, "a", 7)
    assert chosen(shard, "a") == chosen(shard, "c") == "ac"
    come(shard, "b", 7)
    assert chosen(shard, "b") == "ac"  # once and for all


def test_nothing_is_applied_before_the_commit_and_the_late_push_is_dropped() -> None:
    shard = shard_with(2)
    come(shard, "a", 0)
    come(shard, "b", 0)
    assert shard.apply_all() == []
    assert shard.core.commit(key("a"), chosen_by_first(1, "a", "b"))
    (order,) = shard.apply_all()
    assert [part.worker_id for part in order.contributions] == ["a", "b"]
    applied, dropped = Outcome.APPLIED, Outcome.DROPPED
    assert shard.outcomes() == {"a": applied, "b": applied, "c": dropped, "d": dropped}
    come_late = PushId(key("c"), 1)
    opened = shard.core.open_push(come_late, 1, 0, generation=1)
    assert opened is None  # nothing of it is taken
    reply = shard.core.reply_to(come_late)
    assert reply is not None
    assert (reply.outcome, reply.closed_sequence) == (Outcome.DROPPED, 1)
    assert shard.core.on_shard.window_of(key("c")).ranges == []


def test_one_that_was_not_chosen_commits_for_those_that_are_stopped() -> None:
    shard = shard_with(1)
    come(shard, "a", 0)
    come(shard, "b", 1)
    assert chosen(shard, "b") == "a"
    assert shard.core.commit(key("b"), chosen_by_first(1, "a"))
    (order,) = shard.apply_all()
    assert [part.worker_id for part in order.contributions] == ["a"]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "backups", [pytest.param(0, id="quorum"), pytest.param(1, id="backups")]
)
def test_only_whom_shard_0_has_chosen_can_be_committed(
    is_first: bool, backups: int
) -> None:
    """A member that leaves others out changes nothing, whomever it names."""
    rules = ShardRules(is_first=is_first, backup_worker_count=backups)
    shard = DrivenShard({}, [0], rules=rules)
    mode = Mode.BSP if backups else Mode.QUORUM
    shard.install(replace(terms(names="abc", quorum=2), mode=mode))
    shard.core.take_measure_key(b"key")
    for name in "abc":
        come(shard, name, 0)
    true = choice(1, "a", "b")
    proof = proof_of_choice(b"key", true)
    if is_first:
        assert shard.core.choice_for(key("c"), 1) == true._replace(
            gradient_scale=1.0, proof=proof
        )
    forged = [
        choice(1, "c"),
        choice(1, "a"),
        true,  # not said by shard 0, for all this one knows
        choice(1, "a", "c")._replace(proof=proof),
        choice(1, "a", "b", "x")._replace(proof=proof),
        chosen_by_first(1, "c"),  # by another key
        true._replace(proof=proof_of(b"key", 0, true)),  # of a measure
    ]
    for each in forged:
        for name in "abc":
            assert not shard.core.commit(key(name), each)
    assert shard.apply_all() == []
    assert shard.core.commit(key("c"), true._replace(proof=proof))
    (order,) = shard.apply_all()
    assert [part.worker_id for part in order.contributions] == ["a", "b"]


def test_the_window_takes_in_more_and_ends_in_time() -> None:
    shard = shard_with(2, window_ms=100)
    come(shard, "a", 1_000)
    come(shard, "b", 1_040)
    assert [wake.at_ms for wake in shard.of(WakeAt)] == [1_140]
    come(shard, "c", 1_139)
    assert chosen(shard, "a") is None
    shard.core.wake(1_139)
    assert chosen(shard, "a") is None
    assert [w.at_ms for w in shard.of(WakeAt)] == [1_140] * 2  # it was too early
    shard.core.wake(1_140)
    assert chosen(shard, "a") == "abc"
    (closed,) = shard.of(ClockClosed)
    assert (closed.merge.closed_ms, closed.merge.needed_count) == (1_140, 2)


def begin(shard: DrivenShard, name: str, now_ms: int, sequence: int = 1) -> None:
    """Something comes of a worker's last push."""
    push, clock = (
        PushId(key(name), sequence),
        shard.clock_of(PushId(key(name), sequence)),
    )
    shard.core.open_push(push, clock, now_ms, generation=1, is_last=True)


def close(shard: DrivenShard, clock: int, *names: str) -> None:
    """A clock is committed and applied."""
    assert shard.core.commit(key(names[0]), chosen_by_first(clock, *names))
    shard.apply_all()


def test_a_clock_waits_for_a_last_push_that_has_begun() -> None:
    shard = shard_with(1)
    begin(shard, "d", 1_000)
    come(shard, "a", 2_000)
    assert chosen(shard, "a") is None
    assert [wake.at_ms for wake in shard.of(WakeAt)] == [1_000 + LAST_PUSH_WAIT_MS]
    come(shard, "d", 90_000, is_last=True)
    assert chosen(shard, "a") == "ad"


def test_a_last_push_that_came_too_late_is_waited_for_by_the_clocks_after() -> None:
    """For so long in all, and anew once one has counted."""
    shard = shard_with(1)
    come(shard, "a", 0)
    close(shard, 1, "a")
    begin(shard, "d", 1_000)  # it is told that its clock is closed
    come(shard, "a", 2_000, sequence=2)
    assert chosen(shard, "a", 2) is None
    over_ms = 1_000 + LAST_PUSH_WAIT_MS
    shard.core.wake(over_ms - 1)
    assert chosen(shard, "a", 2) is None
    shard.core.wake(over_ms)
    assert chosen(shard, "a", 2) == "a"
    close(shard, 2, "a")
    begin(shard, "d", over_ms + 10, sequence=3)  # it was waited for
    come(shard, "a", over_ms + 20, sequence=3)
    assert chosen(shard, "a", 3) == "a"
    close(shard, 3, "a")
    come(shard, "d", over_ms + 30, sequence=4)
    assert chosen(shard, "d", 4) == "d"
    close(shard, 4, "d")
    begin(shard, "d", over_ms + 40, sequence=5)
    come(shard, "a", over_ms + 50, sequence=5)
    assert chosen(shard, "a", 5) is None


def test_one_that_calls_each_push_its_last_takes_half_of_the_time_at_most() -> None:
    shard = shard_with(1)
    now_ms = waited_ms = 0
    for clock in range(1, 41):
        now_ms += 1_000
        begin(shard, "d", now_ms, sequence=clock)
        come(shard, "a", now_ms, sequence=clock)
        shard.core.wake(now_ms)
        assert chosen(shard, "a", clock) is None
        in_time_ms = shard.of(WakeAt)[-1].at_ms - 1
        waited_ms += in_time_ms - now_ms
        now_ms = in_time_ms
        come(shard, "d", now_ms, sequence=clock, is_last=True)
        assert chosen(shard, "a", clock) == "ad"
        close(shard, clock, "a", "d")
    assert waited_ms <= LAST_PUSH_WAIT_MS + 40 * 1_000
    now_ms += LAST_PUSH_WAIT_MS  # as if nothing had been
    begin(shard, "d", now_ms, sequence=41)
    come(shard, "a", now_ms, sequence=41)
    shard.core.wake(now_ms)
    assert shard.of(WakeAt)[-1].at_ms == now_ms + LAST_PUSH_WAIT_MS


def test_one_that_has_data_again_is_not_waited_for() -> None:
    shard = shard_with(1)
    begin(shard, "d", 1_000)
    shard.core.open_push(PushId(key("d"), 1), 1, 2_000, generation=1)
    come(shard, "a", 3_000)
    assert chosen(shard, "a") == "a"


@pytest.mark.parametrize("mode", [Mode.ASP, Mode.SSP, Mode.BSP])
def test_a_last_push_that_counted_in_another_mode_is_over(mode: Mode) -> None:
    shard = first_shard()
    shard.install(record(dict.fromkeys("ad", 0), mode=mode))
    begin(shard, "d", 0)
    for name in "ad":
        come(shard, name, 10)
    shard.apply_all()
    assert shard.core.on_shard.of(key("d")).last_ms is None


def test_a_last_push_of_one_that_is_evicted_or_has_given_up_is_not_waited_for() -> None:
    for ends in ("evicted", "idle"):
        shard = shard_with(1, names="ad")
        begin(shard, "d", 0)
        come(shard, "a", 10)
        assert chosen(shard, "a") is None
        if ends == "idle":
            shard.core.await_contribution(key("d"), 1, 20)
        else:
            shard.install(
                replace(terms(2, names="a"), departures=(departure("d", last_clock=0),))
            )
        assert chosen(shard, "a") == "a"


def test_a_stopped_member_costs_the_shard_no_memory_for_each_clock() -> None:
    """And it hears of each of its pushes that its clock is closed."""
    shard = shard_with(1)
    for clock in range(1, 201):
        come(shard, "a", clock, sequence=clock)
        close(shard, clock, "a")
        shard.core.acknowledge(key("a"), clock + 1)
        shard.forget()
    window = shard.core.on_shard.window_of(key("d"))
    assert window.done_sequence == 200
    assert window.entries == {}
    for sequence in (1, 100, 200):
        reply = shard.core.reply_to(PushId(key("d"), sequence))
        assert reply is not None
        assert (reply.outcome, reply.closed_sequence) == (Outcome.DROPPED, 200)
    # Once one has counted, those before are done: another process may have made it of
    # the same bytes, as the next leader of a host group would.
    come(shard, "d", 300, sequence=201)
    close(shard, 201, "d")
    shard.core.acknowledge(key("d"), 201)
    reply = shard.core.reply_to(PushId(key("d"), 200))
    assert reply is not None
    assert (reply.outcome, reply.closed_sequence) == (Outcome.DUPLICATE, 201)


def test_when_all_are_there_the_window_is_over() -> None:
    shard = shard_with(2, window_ms=10_000)
    for now_ms, name in enumerate(NAMES):
        assert chosen(shard, name) is None
        come(shard, name, now_ms)
    assert chosen(shard, "a") == NAMES


def test_the_window_ends_before_one_that_came_would_notice() -> None:
    shard = shard_with(2, window_ms=1_000)
    come(shard, "a", 100, slack_ms=70)
    come(shard, "b", 120, slack_ms=900)
    come(shard, "c", 130, slack_ms=20)
    assert [wake.at_ms for wake in shard.of(WakeAt)] == [170, 150]
    shard.core.wake(150)
    assert chosen(shard, "a") == "abc"


def test_workers_without_data_are_neither_waited_for_nor_asked() -> None:
    shard = shard_with(3, window_ms=5_000, names="abc")
    shard.core.await_contribution(key("b"), 1, 0)
    come(shard, "a", 10)
    assert chosen(shard, "a") is None
    shard.core.await_contribution(key("c"), 1, 20)
    assert chosen(shard, "a") == "a"
    shard.core.commit(key("a"), chosen_by_first(1, "a"))
    shard.apply_all()
    # They still have none for the clocks that follow.
    come(shard, "a", 30, sequence=2)
    assert chosen(shard, "a", 2) == "a"
    shard.core.withdraw_awaiting(key("c"))
    shard.core.commit(key("a"), chosen_by_first(2, "a"))
    shard.apply_all()
    come(shard, "a", 40, sequence=3)
    assert chosen(shard, "a", 3) is None


def test_pushes_of_weight_0_count_for_no_quorum() -> None:
    shard = shard_with(2)
    come(shard, "a", 0, weight=0)
    come(shard, "b", 1)
    assert chosen(shard, "a") is None
    come(shard, "c", 2)
    assert chosen(shard, "a") == "abc"
    (closed,) = shard.of(ClockClosed)
    assert {a.push.worker.worker_id for a in closed.merge.arrivals} == {"b", "c"}
    assert closed.merge.active_count == 3


def test_another_quorum_holds_for_the_clock_that_is_open() -> None:
    shard = shard_with(3)
    come(shard, "a", 0)
    come(shard, "b", 0)
    shard.install(terms(2, quorum=2))
    assert chosen(shard, "a") == "ab"


def test_a_clock_that_bsp_has_begun_needs_everybody() -> None:
    shard = first_shard()
    shard.install(record(dict.fromkeys(NAMES, 0)))
    shard.install(terms(2, quorum=1, terms_clock=1))
    for name in NAMES:
        assert shard.of(ApplyChunk) == []
        shard.push(name, chunks=[0])
    assert len(shard.apply_all()) == 1
    come(shard, "b", 0, sequence=2)
    assert chosen(shard, "b", 2) == "b"


def test_an_orphan_closes_no_clock() -> None:
    shard = shard_with(1, window_ms=10)
    come(shard, "a", 0)
    shard.core.set_orphaned(True)
    shard.core.wake(50)
    assert chosen(shard, "a") is None
    shard.core.set_orphaned(False)
    assert chosen(shard, "a") == "a"


@pytest.mark.parametrize(
    ("times", "active", "ends"),
    [
        ((), 3, None),
        ((5,), 3, None),
        ((5, 9), 3, 109),
        ((9, 5, 50), 4, 109),
        ((5, 9, 50), 3, 50),
        ((5,), 1, 5),
    ],
)
def test_when_a_clock_closes(
    times: tuple[int, ...], active: int, ends: int | None
) -> None:
    terms = ModeTerms(Mode.QUORUM, quorum=2, grace_window_ms=100)
    arrivals = [
        Arrival(PushId(WorkerKey(str(n), 1), 1), 1.0, at_ms)
        for n, at_ms in enumerate(times)
    ]
    assert closes_at_ms(terms, arrivals, active) == ends


def test_the_ids_are_those_of_the_shard() -> None:
    shard = shard_with(1)
    come(shard, "a", 0)
    (closed,) = shard.of(ClockClosed)
    assert closed.merge.arrivals == (Arrival(push_id("a"), 1.0, 0),)
