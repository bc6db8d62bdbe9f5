"""A file is there whole and durable, or not at all, and what failed is named."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pswire.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    MissingError,
    StorageError,
)
from pswire.checkpoint.storage import (
    Disk,
    LocalStorage,
    ObjectStorage,
    Storage,
    storage_of,
)
from tests.doubles.failing_store import FailingStore
from tests.doubles.full_disk import full_disk

FOLDER = "step-000000000500"
PATH = f"{FOLDER}/file"


class RecordedDisk(Disk):
    """Does what it is asked to, and fails where it shall."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failing: dict[str, int] = {}

    def _note(self, what: str, path: Path) -> None:
        name = ".partial" if path.name.endswith(".partial") else path.name
        self.done.append(f"{what} {name}")
        if what in self.failing:
            number = self.failing.pop(what)
            raise OSError(number, os.strerror(number))

    def sync(self, file: int, path: Path) -> None:
        self._note("sync", path)
        super().sync(file, path)

    def sync_folder(self, folder: Path) -> None:
        self._note("sync_folder", folder)
        super().sync_folder(folder)

    def rename(self, old: Path, new: Path) -> None:
        self._note("rename", new)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._note("remove", path)
        super().remove(path)


def filled(text: str) -> Callable[[Path], int]:
    return lambda path: path.write_text(text)


def read(storage: Storage, path: str = PATH) -> bytes:
    with storage.open(path) as file:
        return file.read() or b""


@pytest.fixture(params=["local", "store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield LocalStorage(tmp_path / "new" / "root")
    else:
        yield ObjectStorage(
            FailingStore(), "/root", "failing://root", pause=lambda _: None
        )


def test_what_is_written_is_read_back(storage: Storage) -> None:
    returned = storage.write(PATH, filled("text"))

    assert read(storage) == b"text"
    assert storage.size(PATH) == returned == 4
    assert storage.names() == [FOLDER]
    assert storage.names(FOLDER) == ["file"]

    storage.write(PATH, filled("another"))
    assert read(storage) == b"another"


def test_a_file_is_read_from_any_place(storage: Storage) -> None:
    storage.write(PATH, filled("0123456789"))
    with storage.open(PATH) as file:
        assert file.seek(3) == 3
        assert file.read(4) == b"3456"
        assert file.tell() == 7
        assert file.seek(-2, os.SEEK_END) == 8
        assert file.read() == b"89"
        assert file.read(1) == b""


def test_what_is_not_there_is_missing(storage: Storage) -> None:
    assert storage.names() == []
    assert storage.names("no") == []
    for call in (storage.size, storage.open):
        with pytest.raises(MissingError):
            call("no/file")
    storage.remove("no/file")
    storage.remove_folder("no")


def test_a_folder_goes_when_it_is_empty(storage: Storage) -> None:
    storage.write(PATH, filled("text"))

    storage.remove_folder(FOLDER)
    assert read(storage) == b"text"

    storage.remove(PATH)
    storage.remove_folder(FOLDER)
    assert storage.names() == []


def test_a_folder_is_no_file(storage: Storage) -> None:
    storage.write(PATH, filled("text"))

    with pytest.raises(DamagedError, match="folder"):
        storage.size(FOLDER)


def test_bytes_are_durable_before_the_name_and_the_name_before_the_end(
    tmp_path: Path,
) -> None:
    disk = RecordedDisk()
    storage = LocalStorage(tmp_path, disk)

    storage.write(PATH, filled("text"))

    assert disk.done == [
        f"sync_folder {tmp_path.name}",
        "sync .partial",
        "rename file",
        f"sync_folder {FOLDER}",
    ]


@pytest.mark.parametrize("what", ["sync", "rename", "sync_folder"])
def test_a_write_that_fails_leaves_nothing_and_is_not_tried_again(
    tmp_path: Path, what: str
) -> None:
    disk = RecordedDisk()
    storage = LocalStorage(tmp_path, disk)
    storage.write("other", filled("other"))
    disk.done.clear()
    disk.failing[what] = errno.EIO

    with pytest.raises(
        StorageError, match=r"can't be written: Input/output error; check the disk"
    ):
        storage.write("file", filled("text"))

    assert disk.done.count(f"{what} .partial") <= 1
    assert [each for each in disk.done if each.startswith(what)] == disk.done[-2:-1]
    assert storage.names() == ["other"]
    assert storage.write("file", filled("text")) == 4


def test_a_full_disk_is_named_and_leaves_what_was_there(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write(PATH, filled("old"))

    with full_disk(), pytest.raises(StorageError, match="free some space"):
        storage.write(PATH, filled("new"))

    assert read(storage) == b"old"
    assert storage.names(FOLDER) == ["file"]


@pytest.mark.parametrize("kind", ["link", "link_to_folder", "pipe", "folder"])
def test_only_files_are_read(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "root"
    storage = LocalStorage(root)
    storage.write(f"{FOLDER}/other", filled("text"))
    target = root / PATH
    match kind:
        case "link":
            target.symlink_to(root / FOLDER / "other")
        case "link_to_folder":
            (root / FOLDER).rename(tmp_path / "elsewhere")
            (root / FOLDER).symlink_to(tmp_path / "elsewhere")
            (tmp_path / "elsewhere" / "file").write_text("text")
        case "pipe":
            os.mkfifo(target)
        case "folder":
            target.mkdir()

    for call in (storage.size, storage.open):
        with pytest.raises(DamagedError, match="it is"):
            call(PATH)
    if kind == "link_to_folder":
        assert storage.names(FOLDER) == []


def test_the_root_may_be_a_link_and_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()

    LocalStorage(tmp_path / "root").write(PATH, filled("text"))

    assert (tmp_path / "real" / PATH).read_text() == "text"
    with pytest.raises(StorageError, match=r"can't be read: Not a directory; make"):
        LocalStorage(tmp_path / "file").names()
    with pytest.raises(StorageError, match="can't be written"):
        LocalStorage(tmp_path / "file").write(PATH, filled("text"))


def store(*failures: Exception, is_late: bool = False) -> tuple[Storage, FailingStore]:
    files = FailingStore()
    files.failures += failures
    files.is_late = is_late
    pauses: list[float] = []
    return ObjectStorage(files, "/root", "failing://root", pause=pauses.append), files


@pytest.mark.parametrize("is_late", [False, True], ids=["lost", "late"])
def test_a_put_that_fails_twice_is_made_again(is_late: bool) -> None:
    storage, files = store(TimeoutError("slow"), OSError("reset"), is_late=is_late)

    storage.write(PATH, filled("text"))

    assert read(storage) == b"text"
    assert len(files.puts) == (3 if is_late else 1)


def test_a_put_that_fails_each_time_is_named() -> None:
    storage, _ = store(*[TimeoutError("slow")] * 3)

    with pytest.raises(
        StorageError,
        match=rf"failing://root/{PATH} can't be written: TimeoutError, slow; check",
    ):
        storage.write(PATH, filled("text"))
    assert storage.names() == []


def test_a_bucket_that_is_not_there_is_named() -> None:
    storage, _ = store(*[FileNotFoundError("no bucket")] * 3)

    with pytest.raises(StorageError, match="knows no such place; make its bucket"):
        storage.write(PATH, filled("text"))


def test_a_put_that_is_not_there_when_it_ends_a_second_time_is_made_again() -> None:
    # As S3 answers the end of an upload in parts whose first answer was lost.
    storage, files = store(FileNotFoundError("no such upload"))

    storage.write(PATH, filled("text"))

    assert read(storage) == b"text"
    assert len(files.puts) == 1


def test_after_a_try_that_took_long_there_is_no_further_one() -> None:
    files = FailingStore()
    files.failures += [TimeoutError("slow"), OSError("not reached")]
    storage = ObjectStorage(files, "/root", "failing://root", try_s_max=0.0)

    with pytest.raises(StorageError, match="TimeoutError, slow"):
        storage.write(PATH, filled("text"))
    assert len(files.failures) == 1


def test_what_may_not_be_done_is_not_tried_again() -> None:
    storage, files = store(PermissionError("no"), OSError("not reached"))

    with pytest.raises(StorageError, match="PermissionError, no"):
        storage.write(PATH, filled("text"))
    assert len(files.failures) == 1


def test_a_read_that_fails_twice_is_made_again_and_a_third_time_is_named() -> None:
    storage, files = store()
    storage.write(PATH, filled("text"))
    files.failures += [OSError("reset")] * 2
    assert read(storage) == b"text"

    files.failures += [OSError("reset")] * 3
    with pytest.raises(StorageError, match="can't be read: OSError, reset"):
        read(storage)


def test_an_object_that_arrived_cut_off_is_noticed() -> None:
    storage, files = store()
    files.keeps_bytes = 2

    with pytest.raises(StorageError, match="has 2 bytes of 4"):
        storage.write(PATH, filled("text"))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "has no name"),
        ("nosuch://bucket", "Protocol not known: nosuch"),
        ("gs://bucket/folder", "gcsfs"),
        ("http", None),
    ],
)
def test_what_a_url_lacks_is_said(url: str, said: str | None) -> None:
    if said is None:
        assert isinstance(storage_of(url), LocalStorage)
        return
    with pytest.raises(CheckpointError, match=said):
        storage_of(url)


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}"])
def test_a_path_is_a_local_folder(tmp_path: Path, form: str) -> None:
    storage = storage_of(form.format(tmp_path))

    assert isinstance(storage, LocalStorage)
    assert storage.url == str(tmp_path)


def test_a_url_is_shown_without_its_password() -> None:
    storage = storage_of("memory://user:s/e@c/ret@host/folder")

    assert storage.url == "memory://...@host/folder"
