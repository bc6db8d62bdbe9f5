"""A recording: the file of one start of a shard, entry by entry.

It begins with `MAGIC`. An entry is a head of 24 bytes, little endian: the length of its
body, the XXH3-64 of its body, and the XXH3-64 of these 16 bytes. The body is the length
of a line of JSON (4 bytes), the line, and the bytes that it tells of.

Entries go straight to the operating system, and before anybody hears of what they say:
what a shard has applied survives its SIGKILL. A power cut may take the end of the file.
"""

import errno
import json
import logging
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_64, xxh3_64_intdigest

from psserver.config import RECORD_GIB_DEFAULT, ConfigurationError
from pswire.checkpoint.errors import UNREADABLE
from pswire.names import printable

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC: Final = b"paramserver recording 1\n"
SUFFIX: Final = ".recording"

_HEAD: Final = struct.Struct("<QQQ")
_CHECKED: Final = struct.Struct("<QQ")
_LINE_LENGTH: Final = struct.Struct("<I")

_JSON: Final = json.JSONEncoder(separators=(",", ":"))

_PIECE_COUNT_MAX: Final = os.sysconf("SC_IOV_MAX")

log = logging.getLogger("psserver.shard")


class RecordingError(Exception):
    """A file is no recording, or is damaged; the text says which, and where."""


class RecordingFile:
    """The recording of this process. Any thread may write.

    Attributes:
        path: Where it is.
        is_open: Whether it still goes on.
        end_text: Why it has ended before the shard has, in words; empty if it has not.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shard_index: int,
        incarnation: int,
        gib_max: float = RECORD_GIB_DEFAULT,
    ) -> None:
        """Makes the file, and the folder if it is not there.

        Only its owner reads either: gradients tell of the data.

        Args:
            folder: The folder.
            shard_index: Whose recording it is.
            incarnation: Count of the shard's starts.
            gib_max: Size at which it ends.

        Raises:
            ConfigurationError: It can't be made.
        """
        self.path = folder / f"shard-{shard_index}-{incarnation}{SUFFIX}"
        self.is_open = True
        self.end_text = ""
        self._gib_max = gib_max
        self._bytes_left = int(gib_max * (1 << 30))
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise ConfigurationError(_problem(folder, self.path, error)) from error
        with self._lock:
            self._put([MAGIC])

    def write(
        self, kind: str, line: Mapping[str, object], data: "Sequence[Buffer]" = ()
    ) -> None:
        """Writes one entry.

        Its limit, or a disk that is full, ends the recording, with a word in the log,
        and not the training.
        """
        if not self.is_open:
            return
        pieces = _entry(kind, line, data)
        byte_count = sum(map(len, pieces))
        with self._lock:
            if byte_count > self._bytes_left and self.is_open:
                reason = f"it has the {self._gib_max:g} GiB of --record-limit"
                self._put(_entry("end", {"reason": reason}, ()))
                self._end_early(f"{reason}; give a larger one to record more")
            self._put(pieces)

    def close(self) -> None:
        """Ends the file; what is written later is lost."""
        with self._lock:
            self._end()

    def _put(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Writes bytes in one call, which costs a small job more than its bytes do."""
        if not self.is_open:
            return
        left = [memoryview(piece) for piece in pieces]
        try:
            if not os.fstat(self._descriptor).st_nlink:
                self._end_early("its file was deleted; let the folder stay")
                return
            while left:
                count = os.writev(self._descriptor, left[:_PIECE_COUNT_MAX])
                self._bytes_left -= count
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if left:
                    left[0] = left[0][count:]
        except OSError as error:
            self._end_early(
                f"{error.strerror}; make room on its disk, or record on another one"
            )

    def _end_early(self, text: str) -> None:
        if self.is_open:
            self._end()
            self.end_text = text
            log.warning(
                "the recording %s ends here, training goes on: %s. What it has can be "
                "replayed; the next start of this shard begins another one",
                *(self.path, text),
            )

    def _end(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self._descriptor)


def _problem(folder: Path, path: Path, error: OSError) -> str:
    """Why no recording can be made, and what to do."""
    if os.path.lexists(path):
        return (
            f"{path} is there already, of another job perhaps: give --record a folder "
            "of this job alone"
        )
    text = f"no recording can be written to {folder}"
    if folder.is_symlink() and not folder.exists():
        return f"{text}: it is a link to what is not there; make that folder"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{text}: {error.filename} is no folder; give --record a folder"
    return f"{text}: {error.strerror}; give --record a folder that this user can write"


def _entry(
    kind: str, line: Mapping[str, object], data: "Sequence[Buffer]"
) -> list[bytes | memoryview]:
    """The bytes of an entry, in pieces."""
    return _sealed(_JSON.encode({"kind": kind, **line}).encode(), data)


def _sealed(text: bytes, data: "Sequence[Buffer]") -> list[bytes | memoryview]:
    """An entry's line and bytes, behind a head that has their length and digest."""
    front = _LINE_LENGTH.pack(len(text)) + text
    # An array of no bytes is left out: nothing of it would be written.
    views = [view for each in data if (view := memoryview(each).cast("B"))]
    digest = xxh3_64(front)
    for view in views:
        digest.update(view)
    length = len(front) + sum(map(len, views))
    found = digest.intdigest()
    head = _HEAD.pack(length, found, xxh3_64_intdigest(_CHECKED.pack(length, found)))
    return [head + front, *views]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a recording.

    Attributes:
        number: From 1.
        place: Byte of the file that it begins at.
        kind: What it tells of.
        line: What it says.
        data: The bytes that it tells of.
    """

    number: int
    place: int
    kind: str
    line: Mapping[str, Any]
    data: memoryview


class RecordingReader:
    """Reads a recording from its beginning, which may still be written.

    Attributes:
        path: The file.
        cut_text: Where an entry begins whose end lacks, in words; empty if none does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut_text = ""

    def entries(self) -> Iterator[Entry]:
        """All whole entries, in order.

        Raises:
            RecordingError: The file is no recording, or an entry is damaged.
            OSError: It can't be read.
        """
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            magic = file.read(len(MAGIC))
            if not MAGIC.startswith(magic):
                raise RecordingError(
                    f"{self.path} is no recording of this release: name the files or "
                    "the folder that psserver --record has written"
                )
            number, place = 1, len(MAGIC)
            while place < size:
                entry = self._entry(file, number, place, size)
                if entry is None:
                    self.cut_text = f"inside entry {number}, at byte {place}"
                    return
                yield entry
                number, place = number + 1, file.tell()

    def damaged(self, number: int, place: int, what: str) -> RecordingError:
        """An error that names an entry."""
        return RecordingError(
            f"{self.path}: entry {number}, at byte {place}, is damaged: "
            f"{printable(what)}. What was applied before it can be replayed, with "
            "--until"
        )

    def _entry(
        self, file: BufferedReader, number: int, place: int, size: int
    ) -> Entry | None:
        """The next entry; None where the file ends inside it."""
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        length, digest, head_digest = _HEAD.unpack(head)
        if xxh3_64_intdigest(head[: _CHECKED.size]) != head_digest:
            raise self.damaged(number, place, "its head is not as it was written")
        if length > size - place - _HEAD.size:
            return None
        body = memoryview(bytearray(length))
        if file.readinto(body) < length:
            return None
        if xxh3_64_intdigest(body) != digest:
            raise self.damaged(number, place, "its bytes are not as they were written")
        try:
            (line_length,) = _LINE_LENGTH.unpack_from(body)
            start = _LINE_LENGTH.size
            line = json.loads(bytes(body[start : start + line_length]))
            kind = line.pop("kind")
            if not isinstance(kind, str):
                raise TypeError(f"its kind is {kind!r:.64}")
        except (struct.error, *UNREADABLE) as error:
            raise self.damaged(number, place, "no release writes it so") from error
        return Entry(number, place, kind, line, body[start + line_length :])
