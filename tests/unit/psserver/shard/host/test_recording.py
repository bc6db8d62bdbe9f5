"""Files of recordings: whole, cut short, damaged, on a full disk."""

import logging
from pathlib import Path

import pytest

from psserver.config import ConfigurationError
from psserver.shard.host.recording import (
    MAGIC,
    Entry,
    RecordingError,
    RecordingFile,
    RecordingReader,
)
from tests.doubles.full_disk import file_size_limit

DATA = (b"ab", memoryview(b"cdefgh"))


def written(folder: Path, count: int = 3) -> Path:
    file = RecordingFile(folder, shard_index=1, incarnation=4)
    for number in range(count):
        file.write("update", {"number": number, "rate": 0.1}, DATA)
    file.close()
    return file.path


def entries_of(path: Path) -> list[Entry]:
    return list(RecordingReader(path).entries())


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = written(tmp_path / "new" / "folder")

    found = entries_of(path)

    assert path.name == "shard-1-4.recording"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [each.number for each in found] == [1, 2, 3]
    assert found[0].place == len(MAGIC)
    for number, each in enumerate(found):
        assert (each.kind, each.line) == ("update", {"number": number, "rate": 0.1})
        assert bytes(each.data) == b"abcdefgh"


def test_of_a_file_that_is_cut_anywhere_all_whole_entries_are_read(
    tmp_path: Path,
) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    places = [each.place for each in entries_of(path)]
    ends = [*places[1:], len(whole)]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        reader = RecordingReader(path)

        found = list(reader.entries())

        assert len(found) == sum(end <= size for end in ends)
        is_between = size in (*places, *ends) or size < len(MAGIC)
        said = f"inside entry {len(found) + 1}, at byte {[*places, 0][len(found)]}"
        assert reader.cut_text == ("" if is_between else said)


def test_a_changed_byte_names_its_entry_and_its_place(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    places = [each.place for each in entries_of(path)]
    for changed in range(len(MAGIC), len(whole)):
        damaged = bytearray(whole)
        damaged[changed] ^= 0x10
        path.write_bytes(damaged)
        number = sum(place <= changed for place in places)

        with pytest.raises(RecordingError) as bad:
            entries_of(path)

        assert f"entry {number}, at byte {places[number - 1]}, is damaged" in str(
            bad.value
        )


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard-0-1.recording"
    path.write_bytes(b"paramserver recording 2\n more")
    with pytest.raises(RecordingError, match="is no recording of this release"):
        entries_of(path)
    path.write_bytes(b"")
    assert entries_of(path) == []


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="is there already, of another job"):
        RecordingFile(tmp_path, shard_index=1, incarnation=4)
    assert path.read_bytes() == before
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="is there already, of another job"):
        RecordingFile(tmp_path, shard_index=1, incarnation=4)


def test_what_is_no_folder_to_write_in_is_named_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for folder, text in {
        file: f"{file} is no folder; give --record a folder",
        file / "below": f"{file / 'below'} is no folder; give --record a folder",
        link: "it is a link to what is not there; make that folder",
        # For root, too.
        Path("/proc/recordings"): "No such file or directory; give --record a folder "
        "that this user can write",
    }.items():
        with pytest.raises(ConfigurationError) as refused:
            RecordingFile(folder, shard_index=0, incarnation=1)
        assert str(refused.value) == f"no recording can be written to {folder}: {text}"


def test_a_recording_ends_at_its_limit_with_one_line_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordingFile(tmp_path, shard_index=0, incarnation=1, gib_max=500 / 2**30)
    with caplog.at_level(logging.WARNING):
        for number in range(9):
            file.write("update", {"number": number}, DATA)
    file.close()

    (line,) = caplog.messages
    reason = "it has the 4.65661e-07 GiB of --record-limit"
    assert f"ends here, training goes on: {reason}; give a larger one" in line
    assert file.end_text.startswith(reason)
    *found, end = entries_of(file.path)
    assert [each.line["number"] for each in found] == list(range(len(found)))
    assert 0 < len(found) < 9
    assert found[-1].place < 500
    assert (end.kind, end.line) == ("end", {"reason": reason})


def test_a_recording_that_is_deleted_takes_no_more_of_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordingFile(tmp_path, shard_index=0, incarnation=1)
    file.path.unlink()
    with caplog.at_level(logging.WARNING):
        file.write("update", {}, DATA)
        file.write("update", {}, DATA)
    assert len(caplog.messages) == 1
    assert not file.is_open
    assert "its file was deleted" in file.end_text


def test_a_full_disk_ends_the_recording_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordingFile(tmp_path, shard_index=0, incarnation=1)
    with caplog.at_level(logging.WARNING), file_size_limit(300):
        for number in range(9):
            file.write("update", {"number": number}, DATA)
    file.close()

    lines = [each for each in caplog.messages if "ends here, training goes on" in each]
    assert len(lines) == 1
    assert not file.is_open
    assert file.end_text.startswith("File too large; make room on its disk")
    reader = RecordingReader(file.path)
    found = list(reader.entries())
    assert [each.line["number"] for each in found] == list(range(len(found)))
    assert 0 < len(found) < 9
    assert reader.cut_text
