"""Promises that hold in every schedule, tried on many that are drawn.

`PS_SIM_SCHEDULES=50000 pytest tests/property/test_core_schedules.py` tries more;
`PS_SIM_SEED=1234 pytest -k "ssp" ...` tries one, of the scenario that has failed.
"""

import os
import random
import traceback

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

SCENARIOS = {
    "bsp": Scenario(),
    "bsp lossy": Scenario(loses_workers=True, restarts_coordinator=True),
    "bsp waits": Scenario(loses_workers=True, restarts_coordinator=True, may_wait=True),
    "bsp backups": Scenario(has_backups=True),
    "bsp backups lossy": Scenario(
        has_backups=True, loses_workers=True, restarts_coordinator=True, may_wait=True
    ),
    "ssp": Scenario(modes=(Mode.SSP,)),
    "ssp lossy": Scenario(
        modes=(Mode.SSP,), loses_workers=True, restarts_coordinator=True
    ),
    "asp lossy": Scenario(
        modes=(Mode.ASP,), loses_workers=True, restarts_coordinator=True
    ),
    "modes": Scenario(modes=ALL),
    "modes lossy": Scenario(modes=ALL, loses_workers=True, restarts_coordinator=True),
    "clipped lossy": Scenario(
        clip_grad_norm=0.5,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
    ),
    "clipped modes lossy": Scenario(
        modes=ALL, clip_grad_norm=0.5, loses_workers=True, restarts_coordinator=True
    ),
    "clipped backups": Scenario(
        modes=ALL,
        clip_grad_norm=0.5,
        has_backups=True,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
    ),
    "limited lossy": Scenario(
        gradient_norm_max=5.0,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
    ),
    "limited everything": Scenario(
        modes=ALL,
        gradient_norm_max=5.0,
        clip_grad_norm=0.5,
        has_backups=True,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
        cuts_off=True,
    ),
    "everything": Scenario(
        modes=ALL,
        loses_workers=True,
        restarts_coordinator=True,
        has_backups=True,
        may_wait=True,
    ),
    "bsp cut off": Scenario(cuts_off=True),
    "cut off everything": Scenario(
        modes=ALL,
        cuts_off=True,
        loses_workers=True,
        restarts_coordinator=True,
        has_backups=True,
        may_wait=True,
        publishes=True,
    ),
    "cut off ssp lossy": Scenario(
        modes=(Mode.SSP, Mode.ASP),
        cuts_off=True,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "cut off clipped": Scenario(
        modes=ALL,
        cuts_off=True,
        clip_grad_norm=0.5,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "declared": Scenario(declares=True),
    "declared lossy": Scenario(
        declares=True, loses_workers=True, restarts_coordinator=True, may_wait=True
    ),
    "declared backups": Scenario(
        declares=True,
        has_backups=True,
        clip_grad_norm=0.5,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "declared ssp lossy": Scenario(
        modes=(Mode.SSP, Mode.ASP),
        declares=True,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "declared everything": Scenario(
        modes=ALL,
        declares=True,
        loses_workers=True,
        restarts_coordinator=True,
        has_backups=True,
        may_wait=True,
    ),
    "published": Scenario(publishes=True),
    "published lossy": Scenario(
        publishes=True, loses_workers=True, restarts_coordinator=True, may_wait=True
    ),
    "published backups": Scenario(
        publishes=True, has_backups=True, loses_workers=True, restarts_coordinator=True
    ),
    "published everything": Scenario(
        modes=ALL,
        publishes=True,
        loses_workers=True,
        restarts_coordinator=True,
        has_backups=True,
        may_wait=True,
    ),
    "published ssp lossy": Scenario(
        modes=(Mode.SSP, Mode.ASP),
        publishes=True,
        declares=True,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "saved": Scenario(saves=True),
    "saved lossy": Scenario(
        saves=True, loses_workers=True, restarts_coordinator=True, may_wait=True
    ),
    "saved backups": Scenario(
        saves=True, has_backups=True, loses_workers=True, restarts_coordinator=True
    ),
    "saved everything": Scenario(
        modes=ALL,
        saves=True,
        clip_grad_norm=0.5,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
    ),
    "saved ssp lossy": Scenario(
        modes=(Mode.SSP, Mode.ASP),
        saves=True,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "rounds": Scenario(saves=True, steps_again=True),
    "rounds lossy": Scenario(
        saves=True,
        steps_again=True,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
    ),
    "rounds backups": Scenario(saves=True, steps_again=True, has_backups=True),
    "rounds everything": Scenario(
        modes=ALL,
        saves=True,
        steps_again=True,
        clip_grad_norm=0.5,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
    ),
    "rounds ssp lossy": Scenario(
        modes=(Mode.SSP, Mode.ASP),
        saves=True,
        steps_again=True,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "shards": Scenario(saves=True, loses_shards=True),
    "shards lossy": Scenario(
        saves=True,
        loses_shards=True,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
    ),
    "shards everything": Scenario(
        modes=ALL,
        saves=True,
        loses_shards=True,
        steps_again=True,
        clip_grad_norm=0.5,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
    ),
    "shards ssp lossy": Scenario(
        modes=(Mode.SSP, Mode.ASP),
        saves=True,
        loses_shards=True,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "quorum": Scenario(modes=(Mode.QUORUM,)),
    "quorum lossy": Scenario(
        modes=(Mode.QUORUM,),
        loses_workers=True,
        restarts_coordinator=True,
        cuts_off=True,
        may_wait=True,
    ),
    "quorum clipped lossy": Scenario(
        modes=(Mode.QUORUM,),
        clip_grad_norm=0.5,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "quorum clocked": Scenario(
        modes=CLOCKED, loses_workers=True, restarts_coordinator=True, may_wait=True
    ),
    "quorum clipped clocked": Scenario(
        modes=CLOCKED,
        clip_grad_norm=0.5,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "quorum modes": Scenario(
        modes=EVERY, loses_workers=True, restarts_coordinator=True, may_wait=True
    ),
    "quorum everything": Scenario(
        modes=EVERY,
        gradient_norm_max=5.0,
        clip_grad_norm=0.5,
        declares=True,
        publishes=True,
        has_backups=True,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
        cuts_off=True,
    ),
    "quorum saved": Scenario(
        modes=EVERY,
        saves=True,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
    ),
    "quorum shards": Scenario(
        modes=EVERY,
        saves=True,
        loses_shards=True,
        loses_workers=True,
        restarts_coordinator=True,
    ),
    "full disk": Scenario(fills_disk=True, restarts_coordinator=True),
    "full disk everything": Scenario(
        modes=ALL,
        fills_disk=True,
        declares=True,
        loses_workers=True,
        restarts_coordinator=True,
        may_wait=True,
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


@pytest.mark.parametrize("block", range(BLOCK_COUNT))
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_every_schedule_keeps_every_promise(name: str, block: int) -> None:
    for seed in seeds_of(block):
        world = World(seed, SCENARIOS[name])
        world.end_life = check_life
        try:
            world.run()
            for check in (*PROMISES, *SETTINGS_PROMISES, *PUBLISH_PROMISES):
                check(world)
        except (AssertionError, LookupError, Refusal) as error:
            traceback.print_exc()
            pytest.fail(
                f"seed {seed} of {name!r} (again with PS_SIM_SEED={seed}): "
                f"{type(error).__name__} {error}\n{world.described()}"
            )


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
            try:
                if life < life_count:
                    left = world.run_until_killed() or left
                    continue
                world.run()
                for check in (*PROMISES, *SETTINGS_PROMISES, *PUBLISH_PROMISES):
                    check(world)
            except (AssertionError, LookupError, Refusal) as error:
                traceback.print_exc()
                pytest.fail(
                    f"seed {seed} of {name!r} (again with PS_SIM_SEED={seed}): "
                    f"{type(error).__name__} {error}\n{world.described()}"
                )


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
