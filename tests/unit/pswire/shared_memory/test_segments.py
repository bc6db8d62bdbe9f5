"""Segments of shared memory, made and mapped; hostile ones are not mapped."""

import mmap
import os
from pathlib import Path

import pytest

from pswire.shared_memory.segments import (
    MemorySegment,
    SegmentError,
    SegmentHeader,
    SegmentKind,
    boot_id,
    is_wanted,
)

SIZE = 1 << 16

pytestmark = pytest.mark.skipif(not boot_id(), reason="Linux only")


def made() -> MemorySegment:
    return MemorySegment.create(SegmentKind.GRADIENT, SIZE)


def adopted(descriptor: int, **changes: int) -> MemorySegment:
    header = SegmentHeader(
        SegmentKind.GRADIENT, changes.get("number", 1), changes.get("byte_count", SIZE)
    )
    return MemorySegment.adopt(header, descriptor)


def test_what_is_written_is_read_by_who_has_adopted_it() -> None:
    segment = made()
    other = MemorySegment.adopt(segment.header, os.dup(segment.descriptor))

    segment.data[100:104] = b"abcd"

    assert bytes(other.data[100:104]) == b"abcd"
    assert len(other.data) == SIZE


def test_memory_outlives_its_descriptor_as_long_as_views_of_it() -> None:
    segment = made()
    segment.data[100:104] = b"abcd"
    other = MemorySegment.adopt(segment.header, os.dup(segment.descriptor))
    view = other.data[100:104]
    segment.close()

    del segment, other

    assert bytes(view) == b"abcd"


def test_nothing_is_in_the_folder_of_shared_memory() -> None:
    segment = made()

    assert os.readlink(f"/proc/self/fd/{segment.descriptor}").startswith("/memfd:")
    assert os.fstat(segment.descriptor).st_nlink == 0


def test_the_size_stays_and_others_only_read() -> None:
    segment = made()
    other = MemorySegment.adopt(segment.header, os.dup(segment.descriptor))

    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, SIZE // 2)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, SIZE * 2)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.descriptor, SIZE)
    with pytest.raises(PermissionError):
        os.pwrite(segment.descriptor, b"x", 0)
    assert other.data.readonly


def test_memory_that_could_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)

    with pytest.raises(SegmentError, match="its size is not sealed"):
        adopted(descriptor)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_segment_of_another_size_is_not_mapped() -> None:
    segment = made()

    with pytest.raises(
        SegmentError, match=f"it has {SIZE} bytes, and should have {2 * SIZE}"
    ):
        adopted(os.dup(segment.descriptor), byte_count=2 * SIZE)


def test_another_segment_is_not_taken_for_the_one_that_was_announced() -> None:
    segment = made()

    with pytest.raises(SegmentError, match="it is not the gradient segment that was"):
        adopted(os.dup(segment.descriptor), number=segment.header.number + 1)


def test_other_files_are_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    reader, writer = os.pipe()
    os.close(writer)

    for descriptor in (os.open(path, os.O_RDONLY), reader):
        with pytest.raises(SegmentError, match="it is no sealed memory"):
            adopted(descriptor)


def test_a_segment_beyond_all_memory_is_an_error() -> None:
    with pytest.raises(SegmentError, match="bytes can't be made"):
        MemorySegment.create(SegmentKind.VALUES, 1 << 62)


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [("1", True), ("", True), ("yes", True), ("0", False), (" Off ", False)],
)
def test_the_setting_switches_it_off(setting: str, wanted: bool) -> None:
    assert is_wanted(setting) is wanted
