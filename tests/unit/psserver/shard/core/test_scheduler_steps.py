"""What a job that goes on from a cut takes for the steps of its schedulers."""

from dataclasses import replace

import pytest

from psserver.shard.core.core_image import CoreImage
from psserver.shard.core.shard_state import ShardRules, ShardState
from tests.doubles.core_values import push_id, trailer


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([0], 0),
        ([0, 1], 2),
        ([0, 1, 2, 3], 4),
        # At the end of each epoch of three, and of every second push.
        ([0, 0, 0, 1, 1], 1),
        ([0, 0, 0, 1], 1),
        ([0, 0, 1, 1, 2], 2),
        ([0, 0], 0),
        # Two epochs of one push each, and then one that is in the middle.
        ([0, 1, 2, 2], 2),
    ],
)
def test_a_scheduler_of_every_push_is_one_further_at_the_next(
    steps: list[int], expected: int
) -> None:
    state = ShardState(frozenset({0}), ShardRules())
    for sequence, each in enumerate(steps, 1):
        made = replace(trailer([0]), scheduler_steps=(each, 7))
        state.settle(push_id("a", sequence), made)
    assert state.settings_of_next()["optimizer"].scheduler_steps == (expected, 7)


@pytest.mark.parametrize("first_count", [2, 3])
@pytest.mark.parametrize("more_count", [0, 1, 2, 3])
def test_a_job_that_goes_on_may_be_cut_again_after_any_push(
    first_count: int, more_count: int
) -> None:
    """One scheduler steps with every push, the other at the end of each third."""

    def push(state: ShardState, sequences: range) -> None:
        for sequence in sequences:
            steps = (sequence - 1, (sequence - 1) // 3)
            made = replace(trailer([0]), scheduler_steps=steps)
            state.settle(push_id("a", sequence), made)

    before = ShardState(frozenset({0}), ShardRules())
    push(before, range(1, first_count + 1))
    image = CoreImage.of(
        before.clocks, before.on_shard, before.settings_of_next(), before.paces
    )
    state = ShardState(frozenset({0}), ShardRules())
    state.resume(CoreImage.from_json(image.to_json()))
    last = first_count + more_count
    push(state, range(first_count + 1, last + 1))

    (found,) = state.settings_of_next().values()
    assert found.scheduler_steps == (last, (last - 1) // 3)


def test_what_was_loaded_and_not_used_yet_stays() -> None:
    state = ShardState(frozenset({0}), ShardRules())
    state.used["optimizer"] = replace(trailer([0]), scheduler_steps=(5,))
    assert state.settings_of_next()["optimizer"].scheduler_steps == (5,)
