"""Where commands write: what takes nothing is refused before the work, in words."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from psctl import folders, snapshots
from psctl.failures import CommandError, exit_code_of
from pswire.exit_codes import ExitCode
from psworker.snapshots.snapshot import Snapshot
from tests.doubles.full_disk import full_disk

NEVER = Path("/proc/model")
"""A folder is there, and nobody, root included, makes a file in it."""

SNAPSHOT = Snapshot(
    version=12,
    clock=4,
    generation=2,
    job_id="job-1",
    byte_count=16,
    _states={"model": OrderedDict(weight=torch.eye(2))},
)


@pytest.mark.parametrize(
    "place",
    [
        folders.writable_file,
        folders.new_folder,
        folders.placed_whole,
        folders.made_folder,
        lambda path: folders.write_private(path, b"secret"),
        lambda path: snapshots.save_snapshot(SNAPSHOT, path, None),
    ],
)
def test_what_can_not_be_written_is_named_with_what_to_do(
    place: Callable[[Path], object],
) -> None:
    with pytest.raises(CommandError) as caught:
        place(NEVER)
    assert exit_code_of(caught.value) is ExitCode.ERROR
    assert str(caught.value) == (
        "/proc/model can't be written: No such file or directory; name a place where "
        "this user can write files"
    )


def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    out.write_text("an older file")
    with pytest.raises(CommandError, match=r"File too large; free some"), full_disk():
        snapshots.save_snapshot(SNAPSHOT, out, None)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["an older file"]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is a folder; name a file in it") as caught:
        folders.writable_file(tmp_path)
    assert exit_code_of(caught.value) is ExitCode.USAGE


def test_what_is_tried_leaves_nothing(tmp_path: Path) -> None:
    assert folders.writable_file(tmp_path / "model") == tmp_path / "model"
    assert not list(tmp_path.iterdir())
