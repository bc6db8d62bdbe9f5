"""What must hold of settings, declarations and state of optimizers in every schedule.

Whose settings a clock has is worked out here from records and pushes alone.
"""

from psserver.shard.core.push import PushId
from pswire.membership import Member, Outcome, WorkerKey
from tests.doubles.driven_worker import OwnPush
from tests.doubles.world import World
from tests.property.promises import closed_steps, outcome_of


def check_declarations(world: World) -> None:
    """An update runs the declaration that its settings were sent with."""
    for shard in world.shards:
        for source, digest in shard.used:
            own = world.workers[source.worker].pushes[source.sequence]
            assert digest == own.trailer.spec_digest, f"{source} was by another one"


def check_settings(world: World) -> None:
    """In BSP all shards run a clock with settings of one push, after its state.

    It is that of the longest contributor that has weight, as records have them. But for
    clocks that a lost worker was in the middle of, if steps have one phase.
    """
    for clock, found in _settings_by_clock(world).items():
        if clock in torn_clocks(world):
            continue
        assert len({source for source, _ in found}) == 1, f"clock {clock} had {found}"
        if not world.is_bsp:
            continue
        ((source, _), *_) = found
        assert source == _source_of(world, clock), f"clock {clock} had {source}'s"
        own = world.workers[source.worker].pushes[source.sequence]
        if own.trailer.loads_state:
            assert {loaded for _, loaded in found} == {source}


def check_loads(world: World) -> None:
    """State is loaded on all shards by the pushes that are to load it, in one order.

    In SSP and ASP those are the pushes of the longest member, as it knew when it made
    them. What another one brings is loaded at most before all else, for the pushes that
    come before the longest member's.
    """
    for shard in world.shards:
        assert len(set(shard.loads)) == len(shard.loads), "state was loaded twice"
        for push in shard.loads:
            own = world.workers[push.worker].pushes[push.sequence]
            assert own.trailer.loads_state, f"{push} has loaded what it did not bring"
    if world.is_bsp:
        torn = torn_clocks(world)
        expected = [
            source
            for clock, source in sources_of(world).items()
            if clock not in torn and _own(world, source).trailer.loads_state
        ]
        for shard in world.shards:
            loads = [p for p in shard.loads if _clock_of(world, p) not in torn]
            assert loads == expected, f"{shard.name} has loaded {loads}, not {expected}"
    elif not world.has_bsp:
        _check_streamed_loads(world)


def _check_streamed_loads(world: World) -> None:
    counted = _counted_loads(world)
    due = {push for push in counted if _own(world, push).trailer.is_of_longest}
    for shard in world.shards:
        loaded = counted.intersection(shard.loads)
        assert due <= loaded, f"{shard.name} has not loaded {due - loaded}"
        others = loaded - due
        assert others <= set(shard.loads[:1]), f"{shard.name} has loaded {others}"


SETTINGS_PROMISES = (check_declarations, check_settings, check_loads)


def _settings_by_clock(world: World) -> dict[int, set[tuple[PushId, PushId | None]]]:
    found: dict[int, set[tuple[PushId, PushId | None]]] = {}
    for shard in world.shards:
        for clock, settings in shard.settings.items():
            found.setdefault(clock, set()).update(settings)
    return found


def torn_clocks(world: World) -> set[int]:
    """Clocks after the last one of a worker that was lost, without two phases."""
    if world.is_two_phase:
        return set()
    return {
        end.last_clock + 1
        for record in world.coordinator.records
        for end in record.departures
        if end.member.worker in world.lost
    }


def _members(world: World) -> dict[WorkerKey, Member]:
    """Of a job that knows BSP alone: bases never change there."""
    return {
        member.worker: member
        for record in world.coordinator.records
        for member in record.members
    }


def _clock_of(world: World, push: PushId) -> int:
    return _members(world)[push.worker].clock_of(push.sequence)


def _own(world: World, push: PushId) -> OwnPush:
    return world.workers[push.worker].pushes[push.sequence]


def sources_of(world: World) -> dict[int, PushId]:
    """By clock, whose settings count, of a job that knows BSP alone."""
    members = _members(world)

    def standing(push: PushId) -> tuple[bool, int, PushId]:
        is_weightless = _own(world, push).trailer.weight == 0
        return is_weightless, members[push.worker].base_clock, push

    return {
        clock: min(found, key=standing) for clock, found in clocks_of(world).items()
    }


def clocks_of(world: World) -> dict[int, list[PushId]]:
    """The pushes that each clock consists of, of a job that knows BSP alone."""
    closed = closed_steps(world)
    by_clock: dict[int, list[PushId]] = {}
    for key, member in _members(world).items():
        for sequence, own in world.workers[key].pushes.items():
            is_in = sequence <= closed[key]
            if is_in and outcome_of(world, own.push) is not Outcome.DROPPED:
                by_clock.setdefault(member.clock_of(sequence), []).append(own.push)
    return dict(sorted(by_clock.items()))


def _source_of(world: World, clock: int) -> PushId:
    return sources_of(world)[clock]


def _counted_loads(world: World) -> set[PushId]:
    return {
        own.push
        for worker, last in closed_steps(world).items()
        for own in world.workers[worker].pushes.values()
        if own.trailer.loads_state
        and own.push.sequence <= last
        and outcome_of(world, own.push) is not Outcome.DROPPED
    }
