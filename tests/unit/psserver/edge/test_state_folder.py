"""Folders that one process holds: who has one is said, and to do what."""

import os
import re
import socket
from pathlib import Path
from typing import Final

import pytest

from psserver.edge.state_folder import (
    StateFolderError,
    held_checkpoints,
    held_folder,
)

HERE: Final = re.escape(f"process {os.getpid()} on {socket.gethostname()}")


def test_who_holds_a_state_folder_is_named(tmp_path: Path) -> None:
    with (
        held_folder(tmp_path / "state"),
        pytest.raises(StateFolderError, match=f"is in use by {HERE}: if that is"),
        held_folder(tmp_path / "state"),
    ):
        raise AssertionError("held twice")
    with held_folder(tmp_path / "state"):
        pass


def test_a_folder_of_checkpoints_has_one_process_of_a_machine(tmp_path: Path) -> None:
    with held_checkpoints(str(tmp_path)):
        with (
            pytest.raises(StateFolderError, match=f"^{HERE} makes checkpoints in "),
            held_checkpoints(str(tmp_path)),
        ):
            raise AssertionError("held twice")
        # As the file of another machine shows it, which may be gone.
        (tmp_path / "lock").write_text("process 7 on elsewhere\n")
        with held_checkpoints(str(tmp_path)):
            pass


@pytest.mark.parametrize("url", ["", "s3://bucket/run", "/dev/null/folder"])
def test_what_is_no_folder_that_can_be_held_is_left_to_who_writes(url: str) -> None:
    with held_checkpoints(url), held_checkpoints(url):
        assert not Path(url.partition("/")[0] or "s3:").exists()
