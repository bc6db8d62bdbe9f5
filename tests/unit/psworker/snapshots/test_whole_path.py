import os
from pathlib import Path

import pytest

from psworker.snapshots.snapshot_path import written_whole


@pytest.mark.parametrize("is_folder", [False, True])
def test_nothing_is_there_before_all_is_written_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool
) -> None:
    target = tmp_path / "out"
    synced: list[tuple[str, bool]] = []

    def note(file: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        synced.append((name, target.exists()))

    monkeypatch.setattr(os, "fsync", note)

    with written_whole(target) as partial:
        if is_folder:
            partial.mkdir()
        (partial / "a" if is_folder else partial).write_text("all")
        assert not target.exists()

    assert (target / "a" if is_folder else target).read_text() == "all"
    assert [*tmp_path.iterdir()] == [target]
    first = [("a", False)] if is_folder else []
    assert synced == [*first, (partial.name, False), (tmp_path.name, True)]


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_error_leaves_what_was_there(tmp_path: Path, is_folder: bool) -> None:
    target = tmp_path / "out"
    if not is_folder:
        target.write_text("before")

    def write_half() -> None:
        with written_whole(target) as partial:
            if is_folder:
                partial.mkdir()
            (partial / "a" if is_folder else partial).write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_half()

    assert [*tmp_path.iterdir()] == [] if is_folder else [target]
    assert is_folder or target.read_text() == "before"
