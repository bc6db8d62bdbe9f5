"""A disk that loses, when the power fails, whatever was not made durable.

It writes to a real folder, and keeps beside it what a disk would have: which names are
durable in each folder, and which bytes in each file. A power cut leaves a random part
of the rest, as journals and caches do.
"""

import os
import sys
from pathlib import Path
from random import Random
from typing import NamedTuple

from pswire.checkpoint.storage import Disk


class PowerCutError(BaseException):
    """The machine is off: nothing of the process goes on, no clean-up either."""


class _File(NamedTuple):
    content: bytes
    is_synced: bool


class _Change(NamedTuple):
    """Of one folder: what gets a name, or None for a name that goes; all or nothing."""

    names: tuple["_Named", ...]


class _Folder:
    def __init__(self) -> None:
        self.durable: dict[str, _File | _Folder] = {}
        self.pending: list[_Change] = []

    def apply(self, change: _Change) -> None:
        for name, what in change.names:
            if what is None:
                self.durable.pop(name, None)
            else:
                self.durable[name] = what


_Named = tuple[str, _File | _Folder | None]


class LossyDisk(Disk):
    """Works until it has done so many operations; then the power fails.

    It waits for no real disk.

    Attributes:
        done_count: Operations so far.
    """

    def __init__(self, root: Path, operation_count: int = sys.maxsize) -> None:
        self.done_count = 0
        self._operation_count = operation_count
        self._folders: dict[Path, _Folder] = {}
        self._find(root)  # what is there already is durable
        self._root = root
        self._synced: dict[Path, bytes] = {}

    def make_folder(self, folder: Path) -> None:
        self._begin()
        is_new = not folder.is_dir()
        super().make_folder(folder)
        if is_new:
            made = self._folders[folder] = _Folder()
            self._change(folder.parent, (folder.name, made))

    def sync(self, file: int, path: Path) -> None:
        self._begin()
        self._synced[path] = os.pread(file, 1 << 30, 0)

    def sync_folder(self, folder: Path) -> None:
        self._begin()
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        found = self._folders[folder]
        for change in found.pending:
            found.apply(change)
        found.pending.clear()

    def rename(self, old: Path, new: Path) -> None:
        self._begin()
        content = old.read_bytes()
        file = _File(content, self._synced.pop(old, None) == content)
        super().rename(old, new)
        self._change(new.parent, (old.name, None), (new.name, file))

    def remove(self, path: Path) -> None:
        self._begin()
        super().remove(path)
        self._change(path.parent, (path.name, None))

    def remove_folder(self, folder: Path) -> None:
        self._begin()
        super().remove_folder(folder)
        del self._folders[folder]
        self._change(folder.parent, (folder.name, None))

    def after_power_cut(self, root: Path, random: Random) -> None:
        """Writes what may be left of the folder to another one."""
        self._write(self._folders[self._root], root, random)

    def _find(self, path: Path) -> _Folder:
        found = self._folders[path] = _Folder()
        for each in path.iterdir():
            found.durable[each.name] = (
                self._find(each)
                if each.is_dir()
                else _File(each.read_bytes(), is_synced=True)
            )
        return found

    def _begin(self) -> None:
        if self.done_count >= self._operation_count:
            raise PowerCutError
        self.done_count += 1

    def _change(self, folder: Path, *names: "_Named") -> None:
        self._folders[folder].pending.append(_Change(names))

    def _write(self, folder: _Folder, path: Path, random: Random) -> None:
        path.mkdir()
        for change in folder.pending:
            if random.random() < 0.5:
                folder.apply(change)
        for name, what in folder.durable.items():
            if isinstance(what, _Folder):
                self._write(what, path / name, random)
            else:
                (path / name).write_bytes(_left_of(what, random))


def _left_of(file: _File, random: Random) -> bytes:
    if file.is_synced:
        return file.content
    length = len(file.content)
    cut = random.randrange(length + 1)
    left = [b"", file.content[:cut], file.content[:cut] + bytes(length - cut)]
    return random.choice([*left, file.content])
