"""A process that dies while it saves or prunes leaves the old or the new checkpoint."""

from pathlib import Path

import pytest

from pswire.checkpoint.folder import CheckpointFolder
from pswire.failpoints import FAILPOINT_VARIABLE, FAILPOINTS
from tests.doubles.checkpoints import save
from tests.doubles.children import Nursery

PROGRAM = """
import sys

from pswire import failpoints
from pswire.checkpoint.folder import CheckpointFolder
from tests.doubles.checkpoints import save

failpoints.arm()
folder = CheckpointFolder(sys.argv[1])
folder.claim("job", "another token")
save(folder, 200)
print("saved", flush=True)
folder.prune("job", 1)
"""

PLACES = [name for name in FAILPOINTS if name.startswith("checkpoint.")]
TURN_COUNT_MAX = 10


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.timeout(240)
def test_whatever_a_kill_leaves_is_gone_on_from(
    nursery: Nursery, tmp_path: Path, place: str
) -> None:
    for turn in range(1, TURN_COUNT_MAX):
        root = tmp_path / str(turn)
        folder = CheckpointFolder(str(root))
        folder.claim("job", "token")
        save(folder, 100)

        ended = nursery.run(
            *("-c", PROGRAM, str(root)),
            environment={FAILPOINT_VARIABLE: f"{place}=kill@{turn}"},
        )

        newest = folder.newest_good().manifest
        assert newest is not None
        assert newest.version == 200 or "saved" not in ended.stdout
        assert newest.version in (100, 200)
        if ended.returncode == 0:
            break
        folder.claim("job", "a third token")
        name = save(folder, 300)
        folder.prune("job", 1)
        assert folder.names() == (name,)
        assert folder.verify(name) == ()
    assert turn > 1, "it was never reached"
    assert turn < TURN_COUNT_MAX - 1, "it did not end"
