"""While a checkpoint waits for all to be between two batches, none is begun."""

from dataclasses import replace

import pytest

from psserver.edge.fence_report import WorkerHolding
from pswire.membership import FenceKind, Mode
from tests.doubles.core_values import key, push_id, trailer
from tests.doubles.driven_shard import TWO_PHASE, DrivenShard

MODES = [Mode.BSP, Mode.SSP, Mode.ASP]


def running(mode: Mode, *names: str) -> DrivenShard:
    return DrivenShard(
        dict.fromkeys(names or ("a",), 0), [0], mode=mode, staleness_bound=3
    )


def push(
    shard: DrivenShard, name: str, sequence: int, *, continues: bool = False
) -> None:
    """A push arrives whole."""
    what = replace(trailer([0]), continues_batch=continues)
    shard.send_trailer(push_id(name, sequence), what)
    shard.send_chunk(push_id(name, sequence), 0)


def hold(shard: DrivenShard, number: int = 2, **floors: int) -> None:
    """A cut can't be decided: pushes beyond these begin no batch meanwhile."""
    shard.freeze(number, FenceKind.CUT)
    shard.core.abort_fence(number, {key(name): last for name, last in floors.items()})


def held(shard: DrivenShard, number: int) -> dict[str, WorkerHolding]:
    """What a shard reports to a fence."""
    shard.freeze(number, FenceKind.CUT)
    return {h.worker.worker_id: h for h in shard.reports()[-1].holdings}


@pytest.mark.parametrize("mode", MODES)
def test_further_steps_on_a_batch_are_applied_and_the_next_batch_waits(
    mode: Mode,
) -> None:
    shard = running(mode)
    push(shard, "a", 1)
    shard.apply_all()
    hold(shard, a=1)
    push(shard, "a", 2, continues=True)
    shard.apply_all()
    assert shard.core.done_sequences() == ((key("a"), 2),)
    push(shard, "a", 3)
    shard.apply_all()
    assert shard.core.done_sequences() == ((key("a"), 2),)
    assert "between two batches" in shard.core.waiting_reason

    found = held(shard, 3)["a"]
    assert (found.batch_sequence, found.is_between_batches) == (2, True)
    assert found.steps_again
    shard.core.abort_fence(3)
    shard.apply_all()
    assert shard.core.done_sequences() == ((key("a"), 3),)


@pytest.mark.parametrize("mode", MODES)
def test_who_is_below_its_floor_begins_batches(mode: Mode) -> None:
    shard = running(mode)
    hold(shard, a=1)
    push(shard, "a", 1)
    shard.apply_all()
    assert shard.core.done_sequences() == ((key("a"), 1),)


def test_a_clock_in_which_anybody_goes_on_with_a_batch_is_applied() -> None:
    """Who has no data takes part in it with nothing, and begins none by that."""
    shard = running(Mode.BSP, "a", "b")
    hold(shard, a=0, b=0)
    push(shard, "a", 1, continues=True)
    shard.push("b", 1, weight=0.0)
    shard.apply_all()
    assert shard.core.clocks.applied_clock == 1


@pytest.mark.parametrize("mode", MODES)
def test_with_two_phase_steps_a_batch_that_waits_is_not_staged(mode: Mode) -> None:
    shard = DrivenShard({"a": 0}, [0], mode=mode, rules=TWO_PHASE)
    hold(shard, a=0)
    push(shard, "a", 1)
    assert shard.staged() == []
    shard.core.coordinator_lost()
    assert len(shard.staged()) == 1


def test_a_chunk_that_comes_later_is_not_applied_ahead_of_the_cut() -> None:
    """The clock was open before, though nothing of it could be applied yet."""
    shard = running(Mode.BSP)
    shard.send_trailer(push_id("a", 1), trailer([0]))
    hold(shard, a=0)
    shard.send_chunk(push_id("a", 1), 0)
    shard.apply_all()
    assert shard.applied() == []
    shard.core.coordinator_lost()
    shard.apply_all()
    assert shard.core.clocks.applied_clock == 1


def test_a_push_that_is_begun_counts_as_begun_before_it_is_applied() -> None:
    """Its chunks wait for their turn, and get it whatever is held."""
    shard = running(Mode.ASP)
    shard.send_trailer(push_id("a", 1), trailer([0]))
    found = held(shard, 2)["a"]
    assert (found.batch_sequence, found.is_between_batches) == (1, False)


def test_a_worker_that_waits_for_data_is_between_two_batches() -> None:
    shard = running(Mode.ASP)
    push(shard, "a", 1)
    shard.apply_all()
    assert not held(shard, 2)["a"].is_between_batches
    shard.core.abort_fence(2)
    shard.core.await_contribution(key("a"), 2, 0)
    found = held(shard, 3)["a"]
    assert (found.batch_sequence, found.is_between_batches) == (1, True)
    assert not found.steps_again


def test_any_other_fence_ends_the_wait() -> None:
    shard = running(Mode.BSP)
    hold(shard, a=0)
    shard.freeze(3, FenceKind.MEMBERSHIP)
    shard.core.abort_fence(3)
    push(shard, "a", 1)
    shard.apply_all()
    assert shard.core.clocks.applied_clock == 1
