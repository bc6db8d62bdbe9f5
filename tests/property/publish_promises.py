"""What must hold of published values in every schedule.

What each place must hold is worked out here from records and pushes alone.
"""

from collections.abc import Iterator

from psserver.shard.core.push import PushId
from pswire.membership import Outcome
from tests.doubles.driven_worker import OwnPush
from tests.doubles.simulated_shard import SimulatedShard, Written
from tests.doubles.world import World
from tests.property.promises import closed_steps, outcome_of
from tests.property.settings_promises import clocks_of, sources_of, torn_clocks


def check_replaced(world: World) -> None:
    """In BSP a clock of values replaces all before, in each place, by one push's.

    That of the longest contributor. All other clocks add what they consist of, and all
    is there once and in the order of clocks.
    """
    if not world.is_bsp:
        return
    torn = torn_clocks(world)
    sources = sources_of(world)
    counted = clocks_of(world)
    for shard, chunk_index, held in _places(world):
        found = [each for each in held if each.clock not in torn]
        expected = []
        for clock, source in sources.items():
            if clock in torn:
                continue
            replaces = _own(world, source).trailer.publishes
            pushes = [source] if replaces else counted[clock]
            expected += [
                Written(push, clock, replaces)
                for push in pushes
                if _is_due(world, push, shard, chunk_index)
            ]
        key = _sort_key
        assert sorted(found, key=key) == sorted(expected, key=key), (
            f"{shard.name} has {found} in chunk {chunk_index}, not {expected}"
        )
        clocks = [each.clock for each in held]
        assert clocks == sorted(clocks), f"clocks changed places in {chunk_index}"


def check_streamed_values(world: World) -> None:
    """In SSP and ASP the values of a worker that was longest count, others' never.

    Each once, in every place, and in their place among its own pushes.
    """
    if world.has_bsp:
        return
    closed = closed_steps(world)
    for shard, chunk_index, held in _places(world):
        by_worker: dict[object, list[int]] = {}
        for each in held:
            by_worker.setdefault(each.push.worker, []).append(each.push.sequence)
            trailer = _own(world, each.push).trailer
            assert each.replaces is trailer.publishes
            assert trailer.is_of_longest or not trailer.publishes, f"{each} counts"
        for sequences in by_worker.values():
            assert sequences == sorted(set(sequences)), "pushes changed places"
        written = {each.push for each in held}
        for key, last in closed.items():
            for own in world.workers[key].pushes.values():
                is_in = own.push.sequence <= last and own.trailer.publishes
                if is_in and own.trailer.is_of_longest:
                    is_due = _is_due(world, own.push, shard, chunk_index)
                    assert (own.push in written) is is_due, f"{own.push} is not there"


# That a torn clock stays of one kind is shown by `test_mixed_clocks.py`: no drawn
# schedule has noticed a shard that forgets it.
PUBLISH_PROMISES = (check_replaced, check_streamed_values)


def _places(world: World) -> Iterator[tuple[SimulatedShard, int, list[Written]]]:
    for shard in world.shards:
        for chunk_index, held in shard.written.items():
            yield shard, chunk_index, held


def _own(world: World, push: PushId) -> OwnPush:
    return world.workers[push.worker].pushes[push.sequence]


def _is_due(
    world: World, push: PushId, shard: SimulatedShard, chunk_index: int
) -> bool:
    is_sent = (shard.index, chunk_index) in _own(world, push).places
    return is_sent and outcome_of(world, push) is Outcome.APPLIED


def _sort_key(each: Written) -> tuple[int, str, int]:
    return each.clock, str(each.push.worker), each.push.sequence
