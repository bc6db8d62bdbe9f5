"""Two-phase steps in SSP and ASP: each push waits for its own worker's commit."""

import pytest

from psserver.shard.core.effects import ApplyChunk
from pswire.membership import FenceKind, Mode, Outcome
from tests.doubles.core_values import (
    choice,
    departure,
    key,
    push_id,
    record,
    trailer,
)
from tests.doubles.driven_shard import DrivenShard
from tests.unit.psserver.shard.core.two_phase_shards import shard_of, told


@pytest.mark.parametrize("mode", [Mode.SSP, Mode.ASP])
def test_a_push_is_applied_after_its_own_workers_commit(mode: Mode) -> None:
    shard = shard_of("a", "b", chunks=(0, 1), mode=mode)
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 0)
    assert told(shard) == []
    shard.send_chunk(push_id("a"), 1)
    assert told(shard) == [("a", 1, "a")]
    assert shard.of(ApplyChunk) == []

    assert shard.core.commit(key("a"), choice(1, "a"))
    shard.apply_all()

    assert sorted(shard.applied()) == [("a", 1, 0), ("a", 1, 1)]
    assert shard.core.commit(key("a"), choice(1, "a"))


def test_pushes_are_committed_each_by_itself() -> None:
    shard = shard_of("a", "b", mode=Mode.ASP)
    shard.push("a", chunks=[0])
    shard.push("b", chunks=[0])
    shard.core.commit(key("b"), choice(1, "b"))
    shard.apply_all()

    assert shard.applied() == [("b", 1, 0)]
    shard.push("b", 2, chunks=[0])
    assert shard.apply_all() == []


def test_a_push_that_is_not_all_here_is_not_committed() -> None:
    shard = shard_of("a", chunks=(0, 1), mode=Mode.ASP)
    assert not shard.core.commit(key("a"), choice(1, "a"))
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 0)
    assert not shard.core.commit(key("a"), choice(1, "a"))

    shard.send_chunk(push_id("a"), 1)

    assert told(shard) == [("a", 1, "a")]
    assert shard.of(ApplyChunk) == []


def test_a_push_under_way_is_told_again_on_a_new_call() -> None:
    shard = shard_of("a", mode=Mode.ASP)
    shard.push("a", chunks=[0])
    shard.open(push_id("a"))
    assert told(shard) == [("a", 1, "a")] * 2


def test_a_push_that_is_not_finite_skips_itself_after_its_commit() -> None:
    shard = shard_of("a", "b", mode=Mode.ASP)
    shard.push("a", finite=False)
    assert shard.answered() == []
    shard.core.commit(key("a"), choice(1, "a"))
    assert shard.outcomes() == {"a": Outcome.SKIPPED}


def test_the_push_of_a_dead_driver_is_applied_as_every_shard_holds_it() -> None:
    shard = shard_of("a", "b", mode=Mode.ASP)
    shard.push("b", chunks=[0])
    gone = departure("b", last_clock=1, evicted=True)
    shard.freeze(2)
    shard.depart({"a": 0}, gone, steps=1)
    shard.apply_all()

    assert shard.applied() == [("b", 1, 0)]
    assert shard.core.clocks.version == 1


def test_a_push_that_its_dead_worker_had_not_staged_everywhere_leaves_nothing() -> None:
    shard = shard_of("a", "b", mode=Mode.ASP)
    shard.push("b", chunks=[0])
    gone = departure("b", last_clock=0, evicted=True)
    shard.freeze(2)
    shard.depart({"a": 0}, gone)

    assert shard.apply_all() == []
    assert shard.core.state.torn_step_count == 0


def renumbered() -> DrivenShard:
    """`b` was told `staged` under clock 1, which a change of mode has made 3."""
    shard = shard_of("a", "b", mode=Mode.ASP)
    for sequence in (1, 2, 3):
        shard.push("a", sequence, chunks=[0])
        shard.core.commit(key("a"), choice(sequence, "a"))
        shard.apply_all()
    shard.push("b", chunks=[0])
    shard.forget()
    shard.freeze(2, FenceKind.MODE)
    shard.install(
        record(
            {"a": 3, "b": 3},
            generation=2,
            mode=Mode.BSP,
            mode_clock=3,
            base_sequences={"a": 3, "b": 1},
        )
    )
    return shard


@pytest.mark.parametrize("clock", [1, 3])
def test_a_commit_counts_under_the_clocks_number_of_then_and_now(clock: int) -> None:
    """Another shard may have taken it before the change, and tells nothing again."""
    shard = renumbered()
    assert told(shard) == [("b", 3, "b")]

    assert shard.core.commit(key("b"), choice(clock, "b"))
    shard.apply_all()

    assert shard.applied() == [("b", 3, 0)]
    assert shard.replies()[push_id("b")].frontier == 3


def test_a_late_commit_of_a_push_that_is_done_says_nothing_of_the_next() -> None:
    shard = renumbered()
    shard.core.commit(key("b"), choice(1, "b"))
    shard.apply_all()
    for name, sequence in (("a", 4), ("b", 2)):
        shard.push(name, sequence, chunks=[0])

    for clock in (1, 2, 3):
        assert shard.core.commit(key("b"), choice(clock, "b"))

    assert shard.apply_all() == []


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.ASP])
def test_a_push_that_comes_again_hears_that_it_was_committed(mode: Mode) -> None:
    """Its worker may be another process, and the other shards wait for it."""
    shard = shard_of("a", mode=mode)
    shard.push("a", chunks=[0])
    shard.core.commit(key("a"), choice(1, "a"))
    shard.apply_all()
    shard.forget()

    shard.open(push_id("a"))

    assert told(shard) == [("a", 1, "a")]
