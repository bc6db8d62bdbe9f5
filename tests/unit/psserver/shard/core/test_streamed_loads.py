"""Which pushes of SSP and ASP load the optimizer state that they bring."""

import pytest

from psserver.shard.core.effects import LoadState
from psserver.shard.core.push import PushId, Trailer
from pswire.membership import Mode
from tests.doubles.core_values import departure, push_id, record
from tests.doubles.driven_shard import DrivenShard


@pytest.fixture
def shard() -> DrivenShard:
    return DrivenShard(dict.fromkeys("ab", 0), [0], mode=Mode.ASP)


def loading(*, is_of_longest: bool, weight: float = 0.0) -> Trailer:
    return Trailer(
        optimizer="optimizer",
        weight=weight,
        hyperparameters=((0.1,),),
        loads_state=True,
        is_of_longest=is_of_longest,
    )


def loads(shard: DrivenShard) -> list[PushId]:
    return [order.push for order in shard.of(LoadState)]


def test_the_longest_members_push_loads_after_those_of_others(
    shard: DrivenShard,
) -> None:
    shard.step("b", 1, [0])
    shard.send_trailer(push_id("a", 1), loading(is_of_longest=True))

    assert loads(shard) == [push_id("a", 1)]


@pytest.mark.parametrize("first", ["a", "b"])
def test_another_members_push_loads_nothing_whoever_has_pushed_before(
    shard: DrivenShard, first: str
) -> None:
    """Also where the longest has not pushed yet: it may have, on another shard."""
    shard.step(first, 1, [0])
    push = push_id("b", 2 if first == "b" else 1)
    shard.send_trailer(push, loading(is_of_longest=False))

    assert loads(shard) == []


def test_before_all_pushes_any_state_is_loaded(shard: DrivenShard) -> None:
    for name in "ba":
        shard.send_trailer(push_id(name, 1), loading(is_of_longest=name == "a"))

    assert loads(shard) == [push_id("b", 1), push_id("a", 1)]


@pytest.mark.parametrize("is_of_longest", [True, False])
def test_what_counts_is_the_record_that_a_push_was_made_under(
    shard: DrivenShard, is_of_longest: bool
) -> None:
    """Shards hear of a new record at different points between the pushes."""
    shard.step("a", 1, [0])
    shard.freeze(2)
    gone = departure("a", last_clock=1)
    newer = record(
        {"b": 0},
        generation=2,
        mode=Mode.ASP,
        departures=(gone,),
        departed_step_count=1,
    )
    shard.install(newer)
    shard.send_trailer(push_id("b", 1), loading(is_of_longest=is_of_longest))

    assert loads(shard) == [push_id("b", 1)] * is_of_longest
