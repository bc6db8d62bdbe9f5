"""How old the values were that a gradient came from, counted in updates."""

from psserver.shard.core.effects import ApplyChunk
from psserver.shard.core.member_on_shard import MembersOnShard
from psserver.shard.core.push import PushId, Reply
from psserver.shard.core.staleness_counter import StalenessCounter
from pswire.limits import STALENESS_COUNTED_MAX
from pswire.membership import Mode
from tests.doubles.core_values import departure, key, push_id, record, trailer
from tests.doubles.driven_shard import DrivenShard, asp


def pushed(shard: DrivenShard, name: str, sequence: int) -> Reply:
    shard.step(name, sequence, [0])
    return shard.replies()[push_id(name, sequence)]


# The counter


def test_a_push_right_after_its_values_is_not_stale() -> None:
    counter = StalenessCounter(MembersOnShard())
    counter.note_update()
    counter.note_values(key("a"))

    assert counter.of_next(key("a")) == 0


def test_each_update_since_the_values_counts_whoever_pushed_it() -> None:
    counter = StalenessCounter(MembersOnShard())
    counter.note_values(key("a"))
    counter.note_update()
    counter.note_values(key("b"))
    counter.note_update()

    assert counter.of_next(key("a")) == 2
    assert counter.of_next(key("b")) == 1


def test_the_last_count_is_for_all_above_too() -> None:
    counter = StalenessCounter(MembersOnShard())
    for staleness in (
        0,
        STALENESS_COUNTED_MAX - 1,
        STALENESS_COUNTED_MAX,
        STALENESS_COUNTED_MAX + 1,
        1_000,
    ):
        counter.count(staleness)

    assert len(counter.counts) == STALENESS_COUNTED_MAX + 1
    assert counter.counts[0] == 1
    assert counter.counts[STALENESS_COUNTED_MAX - 1 :] == [1, 3]


def test_when_a_mode_begins_all_have_the_same_values() -> None:
    counter = StalenessCounter(MembersOnShard())
    counter.note_update()
    counter.note_values(key("a"))
    counter.note_update()
    counter.begin()
    counter.note_update()

    assert counter.of_next(key("a")) == 1
    assert counter.of_next(key("b")) == 1


# On a shard


def test_the_answer_says_how_many_updates_came_between() -> None:
    shard = asp("a", "b", "c")

    assert pushed(shard, "a", 1).staleness == 0
    assert pushed(shard, "b", 1).staleness == 1
    assert pushed(shard, "b", 2).staleness == 0
    assert pushed(shard, "c", 1).staleness == 3
    assert pushed(shard, "a", 2).staleness == 3
    assert shard.core.staleness_counts[:5] == (2, 1, 0, 2, 0)


def test_of_two_pushes_from_the_same_values_the_later_one_is_stale() -> None:
    """Both are there before either is applied."""
    shard = asp("a", "b")
    shard.push("a", chunks=[0])
    shard.push("b", chunks=[0])
    orders = shard.apply_all()

    assert [order.staleness for order in orders] == [0, 1]
    assert [reply.staleness for reply in shard.replies().values()] == [0, 1]
    assert shard.core.staleness_counts[:2] == (1, 1)


def test_a_pull_is_where_values_come_from_too() -> None:
    shard = asp("a", "b")
    pushed(shard, "a", 1)
    shard.core.pull_reply(key("b"), 0)

    assert pushed(shard, "b", 1).staleness == 0


def test_a_push_that_changes_nothing_makes_nobody_stale() -> None:
    shard = asp("a", "b", "c")
    shard.push("a", finite=False)
    shard.push("b", chunks=[0], weight=0.0)

    assert pushed(shard, "c", 1).staleness == 0
    assert sum(shard.core.staleness_counts) == 1


def test_values_are_given_with_the_answer_and_not_before() -> None:
    """The answer is held back, and what the others push meanwhile goes with it."""
    shard = DrivenShard({"a": 0, "b": 0}, [0], mode=Mode.SSP, staleness_bound=0)
    pushes = [PushId(key("a"), 1), PushId(key("b"), 1)]
    shard.step("a", 1, [0])
    assert shard.answered() == []
    shard.step("b", 1, [0])
    assert [shard.replies()[push].staleness for push in pushes] == [0, 1]

    shard.step("a", 2, [0])
    shard.step("b", 2, [0])
    assert shard.replies()[push_id("a", 2)].staleness == 0


def test_a_push_that_is_thrown_away_is_not_counted() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0, 1], mode=Mode.ASP)
    shard.send_trailer(push_id("b"), trailer([0, 1]))
    shard.send_chunk(push_id("b"), 0)
    shard.apply_all()
    shard.freeze(2)
    gone = departure("b", last_clock=0, evicted=True)
    shard.depart({"a": 0}, gone)

    assert sum(shard.core.staleness_counts) == 0
    shard.push("a", chunks=[0, 1])
    assert [order.staleness for order in shard.apply_all()] == [0, 0]


def test_a_chunk_counts_the_updates_of_pushes_that_are_not_done_yet() -> None:
    """The rest of the push of `b` is on its way."""
    shard = DrivenShard({"a": 0, "b": 0}, [0, 1], mode=Mode.ASP)
    shard.send_trailer(push_id("b"), trailer([0, 1]))
    shard.send_chunk(push_id("b"), 0)
    shard.apply_all()
    shard.push("a", chunks=[0, 1])
    orders = shard.apply_all()

    assert {order.chunk_index: order.staleness for order in orders} == {0: 1, 1: 0}


def test_staleness_begins_anew_where_the_clocks_of_bsp_end() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    for name in "ab":
        shard.push(name, chunks=[0])
    shard.apply_all()
    shard.install(record({"a": 0, "b": 0}, generation=2, mode=Mode.ASP, mode_clock=2))
    shard.step("a", 2, [0])
    shard.step("b", 2, [0])
    assert {reply.staleness for reply in shard.replies().values()} == {0}

    assert pushed(shard, "a", 3).staleness == 0
    assert pushed(shard, "a", 4).staleness == 0
    assert pushed(shard, "b", 3).staleness == 2


def test_values_that_are_given_chunk_by_chunk_are_as_old_as_the_first() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0, 1], mode=Mode.ASP)
    push = shard.push("a", chunks=[0, 1])
    shard.of(ApplyChunk)
    shard.core.chunk_applied(0)
    assert shard.core.admits_values(push)  # and chunk 0 goes to a
    shard.push("b", chunks=[0])
    shard.core.chunk_applied(0)
    shard.core.chunk_applied(1)
    assert shard.core.admits_values(push)
    shard.forget()

    shard.push("a", 2, chunks=[0])
    shard.apply_all()

    assert shard.replies()[push_id("a", 2)].staleness == 1
