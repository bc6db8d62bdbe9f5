"""Promises that hold in every schedule, tried on many that are drawn.

`PS_SIM_SCHEDULES=50000 pytest tests/property/test_core_schedules.py` tries more;
`PS_SIM_SEED=1234 pytest -k "ssp" ...` tries one, of the scenario that has failed.
"""

import os
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from pswire.membership import Mode
from pswire.reasons import Refusal
from tests.doubles.scenario import Scenario
from tests.doubles.world import World
from tests.property.promises import PROMISES, check_saved_batches, check_saved_data
from tests.property.publish_promises import PUBLISH_PROMISES
from tests.property.settings_promises import SETTINGS_PROMISES

SCHEDULE_COUNT = int(os.environ.get("PS_SIM_SCHEDULES", "5000"))
ONE_SEED = os.environ.get("PS_SIM_SEED")

ALL = (Mode.BSP, Mode.SSP, Mode.ASP)
EVERY = (*ALL, Mode.QUORUM)
CLOCKED = (Mode.BSP, Mode.QUORUM)

lossy = partial(Scenario, loses_workers=True, restarts_coordinator=True)

SCENARIOS = {
    "bsp": Scenario(),
    "bsp lossy": lossy(),
    "bsp waits": lossy(may_wait=True),
    "bsp backups": Scenario(has_backups=True),
    "bsp backups lossy": lossy(has_backups=True, may_wait=True),
    "ssp": Scenario(modes=(Mode.SSP,)),
    "ssp lossy": lossy(modes=(Mode.SSP,)),
    "asp lossy": lossy(modes=(Mode.ASP,)),
    "modes": Scenario(modes=ALL),
    "modes lossy": lossy(modes=ALL),
    "clipped lossy": lossy(clip_grad_norm=0.5, may_wait=True),
    "clipped modes lossy": lossy(modes=ALL, clip_grad_norm=0.5),
    "clipped backups": lossy(
        modes=ALL, clip_grad_norm=0.5, has_backups=True, may_wait=True
    ),
    "limited lossy": lossy(gradient_norm_max=5.0, may_wait=True),
    "limited everything": lossy(
        modes=ALL,
        gradient_norm_max=5.0,
        clip_grad_norm=0.5,
        has_backups=True,
        may_wait=True,
        cuts_off=True,
    ),
    "everything": lossy(modes=ALL, has_backups=True, may_wait=True),
    "bsp cut off": Scenario(cuts_off=True),
    "cut off everything": lossy(
        modes=ALL, cuts_off=True, has_backups=True, may_wait=True, publishes=True
    ),
    "cut off ssp lossy": lossy(modes=(Mode.SSP, Mode.ASP), cuts_off=True),
    "cut off clipped": lossy(modes=ALL, cuts_off=True, clip_grad_norm=0.5),
    "declared": Scenario(declares=True),
    "declared lossy": lossy(declares=True, may_wait=True),
    "declared backups": lossy(declares=True, has_backups=True, clip_grad_norm=0.5),
    "declared ssp lossy": lossy(modes=(Mode.SSP, Mode.ASP), declares=True),
    "declared everything": lossy(
        modes=ALL, declares=True, has_backups=True, may_wait=True
    ),
    "published": Scenario(publishes=True),
    "published lossy": lossy(publishes=True, may_wait=True),
    "published backups": lossy(publishes=True, has_backups=True),
    "published everything": lossy(
        modes=ALL, publishes=True, has_backups=True, may_wait=True
    ),
    "published ssp lossy": lossy(
        modes=(Mode.SSP, Mode.ASP), publishes=True, declares=True
    ),
    "saved": Scenario(saves=True),
    "saved lossy": lossy(saves=True, may_wait=True),
    "saved backups": lossy(saves=True, has_backups=True),
    "saved everything": lossy(modes=ALL, saves=True, clip_grad_norm=0.5, may_wait=True),
    "saved ssp lossy": lossy(modes=(Mode.SSP, Mode.ASP), saves=True),
    "rounds": Scenario(saves=True, steps_again=True),
    "rounds lossy": lossy(saves=True, steps_again=True, may_wait=True),
    "rounds backups": Scenario(saves=True, steps_again=True, has_backups=True),
    "rounds everything": lossy(
        modes=ALL, saves=True, steps_again=True, clip_grad_norm=0.5, may_wait=True
    ),
    "rounds ssp lossy": lossy(modes=(Mode.SSP, Mode.ASP), saves=True, steps_again=True),
    "shards": Scenario(saves=True, loses_shards=True),
    "shards lossy": lossy(saves=True, loses_shards=True, may_wait=True),
    "shards everything": lossy(
        modes=ALL,
        saves=True,
        loses_shards=True,
        steps_again=True,
        clip_grad_norm=0.5,
        may_wait=True,
    ),
    "shards ssp lossy": lossy(
        modes=(Mode.SSP, Mode.ASP), saves=True, loses_shards=True
    ),
    "quorum": Scenario(modes=(Mode.QUORUM,)),
    "quorum lossy": lossy(modes=(Mode.QUORUM,), cuts_off=True, may_wait=True),
    "quorum clipped lossy": lossy(modes=(Mode.QUORUM,), clip_grad_norm=0.5),
    "quorum clocked": lossy(modes=CLOCKED, may_wait=True),
    "quorum clipped clocked": lossy(modes=CLOCKED, clip_grad_norm=0.5),
    "quorum modes": lossy(modes=EVERY, may_wait=True),
    "quorum everything": lossy(
        modes=EVERY,
        gradient_norm_max=5.0,
        clip_grad_norm=0.5,
        declares=True,
        publishes=True,
        has_backups=True,
        may_wait=True,
        cuts_off=True,
    ),
    "quorum saved": lossy(modes=EVERY, saves=True, may_wait=True),
    "quorum shards": lossy(modes=EVERY, saves=True, loses_shards=True),
    "leaders": Scenario(loses_leaders=True, is_two_phase=True),
    "leaders clipped": Scenario(loses_leaders=True, clip_grad_norm=0.5),
    "leaders ssp lossy": lossy(
        modes=(Mode.SSP, Mode.ASP),
        loses_leaders=True,
        is_two_phase=True,
        clip_grad_norm=0.5,
    ),
    "leaders backups": Scenario(
        loses_leaders=True, has_backups=True, clip_grad_norm=0.5
    ),
    "leaders quorum": Scenario(
        modes=(Mode.QUORUM,), loses_leaders=True, clip_grad_norm=0.5
    ),
    "leaders everything": lossy(
        modes=EVERY,
        loses_leaders=True,
        gradient_norm_max=5.0,
        clip_grad_norm=0.5,
        has_backups=True,
        may_wait=True,
        cuts_off=True,
    ),
    "full disk": Scenario(fills_disk=True, restarts_coordinator=True),
    "full disk everything": lossy(
        modes=ALL, fills_disk=True, declares=True, may_wait=True
    ),
}
BLOCK_COUNT = 4


def seeds_of(block: int) -> list[int]:
    """Seeds of one test; with `PS_SIM_SEED`, that one alone."""
    if ONE_SEED is not None:
        return [int(ONE_SEED)] if block == 0 else []
    count = max(1, SCHEDULE_COUNT // len(SCENARIOS))
    return list(range(block, count, BLOCK_COUNT))


def check_life(world: World) -> None:
    """What must hold of checkpoints before the job returns to one of them."""
    for check in (check_saved_data, check_saved_batches):
        check(world)


def check_promises(world: World) -> None:
    """What must hold at the end of a run."""
    for check in (*PROMISES, *SETTINGS_PROMISES, *PUBLISH_PROMISES):
        check(world)


@contextmanager
def named_when_broken(world: World, name: str, seed: int) -> Iterator[None]:
    """Fails with the world's story, and with how to see it again."""
    try:
        yield
    except (AssertionError, LookupError, Refusal) as error:
        traceback.print_exc()
        pytest.fail(
            f"seed {seed} of {name!r} (again with PS_SIM_SEED={seed}): "
            f"{type(error).__name__} {error}\n{world.described()}"
        )


@pytest.mark.parametrize("block", range(BLOCK_COUNT))
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_every_schedule_keeps_every_promise(name: str, block: int) -> None:
    for seed in seeds_of(block):
        world = World(seed, SCENARIOS[name])
        world.end_life = check_life
        with named_when_broken(world, name, seed):
            world.run()
            check_promises(world)


RESUMED = ("everything", "declared everything", "published everything", "clipped lossy")


@pytest.mark.parametrize("block", range(BLOCK_COUNT))
@pytest.mark.parametrize("name", RESUMED)
def test_a_job_that_is_killed_whole_keeps_every_promise(name: str, block: int) -> None:
    """And is killed again, up to three times, before it comes to its end."""
    for seed in seeds_of(block)[::2]:
        left = None
        life_count = random.Random(seed).randint(1, 3)
        for life in range(life_count + 1):
            world = World(10 * seed + life, SCENARIOS[name], left)
            with named_when_broken(world, name, seed):
                if life < life_count:
                    left = world.run_until_killed() or left
                    continue
                world.run()
                check_promises(world)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    def trace() -> list[object]:
        world = World(7, SCENARIOS[name])
        world.run()
        return [
            world.event_count,
            world.coordinator.records,
            world.coordinator.snapshots,
            [shard.answers for shard in world.shards],
            [shard.values for shard in world.shards],
        ]

    assert trace() == trace()
