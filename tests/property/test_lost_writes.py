"""The power fails at a drawn moment of a save, and a job goes on from what is left."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.doubles.lossy_disk import PowerCutError
from tests.doubles.world import World
from tests.doubles.world_folder import WorldFolder, newest_left
from tests.property.promises import PROMISES
from tests.property.test_core_schedules import SCENARIOS, SCHEDULE_COUNT

NAMES = ("saved", "saved everything", "rounds lossy")

OPERATION_COUNT = 150
"""Operations of the disk in some five saves of a small world."""


def lives(seed: int, name: str, place: Path) -> Iterator[World]:
    """Worlds of one job, each from what a power cut has left of the one before."""
    rng = Random(seed)
    left = None
    for life in range(3):
        world = World(10 * seed + life, SCENARIOS[name], left)
        root = place / str(life)
        if life == 0:
            root.mkdir()
        cut_after = rng.randrange(1, OPERATION_COUNT)
        folder = WorldFolder(root, len(world.shards), cut_after)
        world.coordinator.folder = folder
        try:
            world.run()
        except PowerCutError:
            folder.lose(place / str(life + 1), rng)
            found = newest_left(place / str(life + 1))
            name_left = "" if found is None else found[0].name
            before = "" if left is None else left.point.place.name
            assert name_left in {folder.committed or before, folder.committing}
            if found is None:
                return
            left = world.left_over(*found)
        else:
            yield world
            return


@pytest.mark.parametrize("name", NAMES)
def test_a_job_goes_on_from_what_a_power_cut_leaves_of_a_save(
    name: str, tmp_path: Path
) -> None:
    for seed in range(max(1, SCHEDULE_COUNT // 500)):
        place = tmp_path / str(seed)
        place.mkdir()
        try:
            for world in lives(seed, name, place):
                for check in PROMISES:
                    check(world)
        except AssertionError as error:
            error.add_note(f"seed {seed} of {name!r}")
            raise
