"""What writes a model, in any format, raises what the system said of the disk."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from psworker.snapshots.exported import write_dcp, write_state_dict
from psworker.snapshots.huggingface import write_huggingface
from psworker.snapshots.snapshot import Snapshot
from tests.doubles.full_disk import full_disk

TENSORS = OrderedDict(weight=torch.eye(2))
STATE = {"models": {"model": TENSORS}, "optimizers": {}, "parameter_names": {}}
SNAPSHOT = Snapshot(
    version=1, clock=1, generation=0, job_id="j", byte_count=16, _states={"m": TENSORS}
)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(SNAPSHOT.save, id="safetensors"),
        pytest.param(lambda path: write_state_dict(STATE, path), id="torch.save"),
        pytest.param(lambda path: write_dcp(STATE, path), id="dcp"),
        pytest.param(
            lambda path: write_huggingface(
                path, TENSORS, lambda name: (TENSORS[name],), metadata={}
            ),
            id="huggingface",
        ),
    ],
)
def test_what_the_system_said_is_raised(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    with pytest.raises(OSError, match="File too large"), full_disk():
        write(tmp_path / "model")
    with pytest.raises(FileNotFoundError):
        write(Path("/proc/model"))  # also for root
    assert not list(tmp_path.iterdir())
