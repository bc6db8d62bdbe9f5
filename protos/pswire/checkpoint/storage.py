"""Where checkpoints are kept: a local folder, or whatever fsspec reaches.

A file is there under its name when all of it is durable, and not before.
"""

import errno
import io
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from pswire import failpoints
from pswire.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    MissingError,
    StorageError,
)
from pswire.names import printable, shown_url

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from fsspec import AbstractFileSystem

T = TypeVar("T")

PARTIAL_ENDING: Final = ".partial"
"""Of files that are being written, or whose process has died."""

_PAUSES_S: Final = (0.5, 2.0)
"""Before each further try of a request to an object store."""

_TRY_S_MAX: Final = 30.0
"""After a try that took longer there is no further one: the file system has tried."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LINKS: Final = (errno.ELOOP, errno.ENOTDIR)
"""What opening says where a link, or a file, is in place of what we follow."""


class Storage(Protocol):
    """Files by their paths below one root, such as `step-000000000500/manifest.json`.

    All methods raise `StorageError` when the root can't be read or written. Those that
    read a file raise `MissingError` where there is none, and `DamagedError` where it is
    a link or a folder, or its disk does not return it.

    Attributes:
        url: The root, for people.
    """

    url: str

    def names(self, folder: str = "") -> list[str]:
        """Names of all in a folder, sorted; none where there is no folder."""

    def size(self, path: str) -> int:
        """Bytes of a file."""

    def open(self, path: str) -> io.RawIOBase:
        """Opens a file for reading, at any place."""

    def write(self, path: str, fill: Callable[[Path], T]) -> T:
        """Makes a file durable, in place of one that is there.

        Args:
            path: Where.
            fill: Writes the contents to a local file. What it returns is returned.
        """

    def remove(self, path: str) -> None:
        """Deletes a file, if it is there."""

    def remove_folder(self, folder: str) -> None:
        """Deletes a folder, if it is there and empty."""


def storage_of(url: str) -> Storage:
    """What reads and writes a URL or a path.

    Raises:
        CheckpointError: It names nothing that can be read or written.
    """
    protocol, _, rest = url.rpartition("://")
    if not url.strip():
        raise CheckpointError("a folder of checkpoints has no name: give a path or URL")
    if protocol in ("", "file", "local"):
        return LocalStorage(Path(rest).expanduser().absolute())
    shown = shown_url(url)
    from fsspec.core import url_to_fs

    try:
        files, root = url_to_fs(url)
    except ImportError as error:
        raise CheckpointError(
            f"{shown} can't be used: {error}; install that where the coordinator, the "
            "shards and psctl run"
        ) from error
    except Exception as error:  # of any file system's own
        raise CheckpointError(
            f"{shown} can't be used: {printable(str(error))}; give a path, or a URL of "
            "a file system that fsspec knows, such as s3://BUCKET/FOLDER"
        ) from error
    return ObjectStorage(files, root, shown)


class Disk:
    """What a local folder asks of the system so that what it has written stays."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)

    def sync(self, file: int, path: Path) -> None:
        """Makes the contents of a file durable.

        Args:
            file: The file.
            path: Where it is.
        """
        del path
        os.fsync(file)

    def sync_folder(self, folder: Path) -> None:
        """Makes durable which files are in a folder."""
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        folder.rmdir()


class LocalStorage:
    """A folder of this machine, or of a file system that it has mounted."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.url = str(root)
        self._root = root
        self._disk = disk or Disk()

    def names(self, folder: str = "") -> list[str]:
        try:
            file = self._folder([folder] if folder else [])
        except FileNotFoundError:
            return []
        except OSError as error:
            if folder and error.errno in _LINKS:
                return []
            raise self._unreadable(folder, error) from error
        try:
            return sorted(os.listdir(file))
        finally:
            os.close(file)

    def size(self, path: str) -> int:
        with self.open(path) as file:
            return os.fstat(file.fileno()).st_size

    def open(self, path: str) -> io.RawIOBase:
        try:
            return self._opened(path)
        except OSError as error:
            raise self._unreadable(path, error) from error

    def write(self, path: str, fill: Callable[[Path], T]) -> T:
        target = self._root / path
        try:
            self._make_folders(target.parent)
            partial = target.with_name(
                f".{target.name}.{secrets.token_hex(8)}{PARTIAL_ENDING}"
            )
            try:
                filled = self._filled(partial, fill)
                self._disk.rename(partial, target)
            except BaseException:
                # After an fsync that failed, another one may succeed without the bytes
                # on the disk: this file is not used again.
                with suppress(OSError):
                    self._disk.remove(partial)
                raise
            failpoints.hit("checkpoint.file_renamed")
            try:
                self._disk.sync_folder(target.parent)
            except OSError:
                with suppress(OSError):
                    self._disk.remove(target)
                raise
        except OSError as error:
            raise self._unwritable(path, error) from error
        failpoints.hit("checkpoint.file_durable")
        return filled

    def remove(self, path: str) -> None:
        target = self._root / path
        try:
            self._disk.remove(target)
            self._disk.sync_folder(target.parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._unwritable(path, error) from error
        failpoints.hit("checkpoint.file_removed")

    def remove_folder(self, folder: str) -> None:
        try:
            self._disk.remove_folder(self._root / folder)
            self._disk.sync_folder(self._root)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise self._unwritable(folder, error) from error

    def _folder(self, names: Sequence[str]) -> int:
        """Opens a folder by the folders on its way, none of which may be a link."""
        at = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        for name in names:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            try:
                below = os.open(name, flags, dir_fd=at)
            finally:
                os.close(at)
            at = below
        return at

    def _opened(self, path: str) -> io.RawIOBase:
        *folders, name = path.split("/")
        at = self._folder(folders)
        try:
            # Neither follows a link nor waits for the other end of a pipe.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(name, flags, dir_fd=at)
        finally:
            os.close(at)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise DamagedError("it is no file, but a folder or a device")
        return os.fdopen(file, "rb", buffering=0)

    def _filled(self, partial: Path, fill: Callable[[Path], T]) -> T:
        filled = fill(partial)
        failpoints.hit("checkpoint.file_written")
        with partial.open("r+b", buffering=0) as file:
            self._disk.sync(file.fileno(), partial)
        failpoints.hit("checkpoint.file_synced")
        return filled

    def _make_folders(self, folder: Path) -> None:
        """Makes what there is not of a path, each durable in the folder above it."""
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        for each in reversed(missing):
            self._disk.make_folder(each)
        # The one that is there may be another shard's of a moment ago.
        for each in missing or [folder]:
            if each in missing or each != self._root:
                self._disk.sync_folder(each.parent)

    def _unreadable(self, path: str, error: OSError) -> CheckpointError:
        if isinstance(error, FileNotFoundError):
            return MissingError("it is missing")
        if path and error.errno in _LINKS:
            return DamagedError("it is, or is behind, a symbolic link or a file")
        if path and error.errno == errno.EIO:
            return DamagedError(f"the disk does not return it: {error.strerror}")
        return StorageError(
            f"{self._named(path)} can't be read: {error.strerror or error}; make it a "
            "folder that this user can read, or name another one"
        )

    def _unwritable(self, path: str, error: OSError) -> StorageError:
        cure = "make it a folder that this user can write, or name another one"
        if error.errno in _FULL:
            cure = "free some space, or name a folder on another disk"
        elif error.errno == errno.EIO:
            cure = "check the disk, or name a folder on another one"
        return StorageError(
            f"{self._named(path)} can't be written: {error.strerror or error}; {cure}"
        )

    def _named(self, path: str) -> str:
        return printable(f"{self.url}/{path}" if path else self.url)


class ObjectStorage:
    """Objects of a store that fsspec reaches: each is put whole, from a local file."""

    def __init__(
        self,
        files: "AbstractFileSystem",
        root: str,
        url: str,
        *,
        pause: Callable[[float], None] = time.sleep,
        try_s_max: float = _TRY_S_MAX,
    ) -> None:
        self.url = url
        self._files = files
        self._root = root.rstrip("/")
        self._pause = pause
        self._try_s_max = try_s_max

    def names(self, folder: str = "") -> list[str]:
        path = f"{self._root}/{folder}" if folder else self._root

        def listed() -> list[str]:
            self._files.invalidate_cache()
            found: list[str] = self._files.ls(path, detail=False)
            # A store without folders lists the folder's own marker too.
            return [each for each in found if each.rstrip("/") != path]

        try:
            found = self._request("listed", folder, listed)
        except MissingError:
            return []
        return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def size(self, path: str) -> int:
        def size() -> int:
            self._files.invalidate_cache()
            found = self._files.info(self._path(path))
            return int(found["size"]) if found["type"] == "file" else -1

        byte_count = self._request("read", path, size)
        if byte_count < 0:
            raise DamagedError("it is no object, but a folder")
        return byte_count

    def open(self, path: str) -> io.RawIOBase:
        byte_count = self.size(path)

        def read(start: int, stop: int) -> bytes:
            return self._request(
                "read",
                path,
                lambda: bytes(
                    self._files.cat_file(self._path(path), start=start, end=stop)
                ),
            )

        return _RangeFile(read, byte_count)

    def write(self, path: str, fill: Callable[[Path], T]) -> T:
        with tempfile.TemporaryDirectory(prefix="paramserver-checkpoint-") as folder:
            local = Path(folder, "file")
            try:
                filled = fill(local)
                expected = local.stat().st_size
            except OSError as error:
                raise StorageError(
                    f"a file for {self.url} can't be written to {folder} first: "
                    f"{error.strerror or error}; free some space there, or set TMPDIR"
                ) from error
            failpoints.hit("checkpoint.file_written")
            # Twice is once: an object is replaced whole, by the same bytes.
            try:
                self._request(
                    "written",
                    path,
                    lambda: self._files.put_file(str(local), self._path(path)),
                    # An upload in parts is, too, when the end of it arrives twice.
                    tries_missing=True,
                )
            except MissingError as error:
                raise StorageError(
                    f"{self._named(path)} can't be written: the store knows no such "
                    "place; make its bucket, or name another one"
                ) from error
        byte_count = self.size(path)
        if byte_count != expected:
            raise StorageError(
                f"{self._named(path)} has {byte_count} bytes of {expected} that were "
                "put there; check the store"
            )
        failpoints.hit("checkpoint.file_durable")
        return filled

    def remove(self, path: str) -> None:
        with suppress(MissingError):
            self._request(
                "deleted", path, lambda: self._files.rm_file(self._path(path))
            )
        failpoints.hit("checkpoint.file_removed")

    def remove_folder(self, folder: str) -> None:
        # Where there are folders at all. An empty one that stays is in nobody's way.
        with suppress(CheckpointError):
            self._request(
                "deleted", folder, lambda: self._files.rmdir(self._path(folder))
            )

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _request(
        self,
        what: str,
        path: str,
        call: Callable[[], T],
        *,
        tries_missing: bool = False,
    ) -> T:
        for pause_s in (*_PAUSES_S, None):
            began_s = time.monotonic()
            try:
                return call()
            except FileNotFoundError:
                if pause_s is None or not tries_missing:
                    raise MissingError("it is missing") from None
            except (AttributeError, ImportError, NameError, TypeError):
                raise  # a bug, which no further try mends
            except Exception as error:  # each file system has errors of its own
                is_slow = time.monotonic() - began_s > self._try_s_max
                if pause_s is None or is_slow or isinstance(error, PermissionError):
                    raise StorageError(
                        f"{self._named(path)} can't be {what}: {type(error).__name__}, "
                        f"{printable(str(error))[:256]}; check that the store is "
                        "reached from here, and that this user may do that"
                    ) from error
            self._pause(pause_s)
        raise AssertionError("the last try returns or raises")

    def _named(self, path: str) -> str:
        return printable(f"{self.url}/{path}" if path else self.url)


class _RangeFile(io.RawIOBase):
    """An object as a file; each read asks the store for just that."""

    def __init__(self, read: Callable[[int, int], bytes], byte_count: int) -> None:
        self._read_range = read
        self._byte_count = byte_count
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {
            io.SEEK_SET: 0,
            io.SEEK_CUR: self._position,
            io.SEEK_END: self._byte_count,
        }
        self._position = starts[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._byte_count, self._position + len(view))
        if stop <= self._position:
            return 0
        data = self._read_range(self._position, stop)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
