"""A folder of checkpoints: what there is, what of it is whole, and how it grows.

URL/owner.json                                   whose coordinator writes here
URL/step-000000000500/part-00000-of-00002.safetensors      by shard 0
URL/step-000000000500/part-00001-of-00002.safetensors      by shard 1
URL/step-000000000500/state.safetensors          by the coordinator, where there is any
URL/step-000000000500/manifest.json              by the coordinator, last
"""

import errno
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from io import BytesIO, RawIOBase
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from xxhash import xxh3_128_hexdigest

from pswire import failpoints
from pswire.checkpoint.errors import (
    UNREADABLE,
    CheckpointError,
    DamagedError,
    FormatError,
    MissingError,
    OwnerError,
    StorageError,
)
from pswire.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    STATE,
    CheckpointName,
    FilePart,
    Manifest,
)
from pswire.checkpoint.part_head import check_contents, read_head
from pswire.checkpoint.retention import Held, superfluous
from pswire.checkpoint.storage import PARTIAL_ENDING, Storage, storage_of
from pswire.limits import STATE_BYTES_MAX
from pswire.names import printable

if TYPE_CHECKING:
    import torch
    from _typeshed import WriteableBuffer

    from pswire.checkpoint.parts import PartReader

OWNER: Final = "owner.json"

_OWNER_BYTES_MAX: Final = 1 << 20

_BEGUN_COUNT_MAX: Final = 100
"""Checkpoints without a manifest that a folder remembers as its job's."""

_READ_THREAD_COUNT: Final = 4
"""Parts of a checkpoint that are read back at once."""

_PART: Final = re.compile(r"part-[0-9]{5}-of-[0-9]{5}\.safetensors")
_PARTIAL: Final = re.compile(
    rf"\.({_PART.pattern}|{re.escape(STATE)}|{re.escape(MANIFEST)})\.[0-9a-f]{{16}}"
    rf"{re.escape(PARTIAL_ENDING)}"
)
"""What a write leaves whose process has died."""


class Newest(NamedTuple):
    """The checkpoint to go on from.

    Attributes:
        manifest: Its manifest, None where none is good.
        problems: What is wrong with each newer one, by name, the newest first.
    """

    manifest: Manifest | None
    problems: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose coordinator writes to a folder.

    Attributes:
        job_id: Its job.
        token: Its process.
        begun: Checkpoints that the job has begun and may not have completed.
        undone: Checkpoints whose steps the job has gone back behind.
    """

    job_id: str
    token: str
    begun: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the JSON of `asdict`; `DamagedError` for anything else."""
        try:
            found = json.loads(data)
            owner = cls(
                found["job_id"],
                found["token"],
                tuple(found["begun"]),
                tuple(found["undone"]),
            )
            names = (*owner.begun, *owner.undone)
            is_text = all(
                isinstance(each, str) for each in (owner.job_id, owner.token, *names)
            )
        except UNREADABLE as error:
            raise DamagedError("it names no owner") from error
        if not is_text or any(CheckpointName.parse(each) is None for each in names):
            raise DamagedError("it names no owner, or no checkpoints")
        return owner


class CheckpointFolder:
    """Checkpoints at a URL. Its calls block, and may come from several threads.

    Beside what they name, all raise `StorageError` when the folder can't be read or
    written, and `CheckpointError` for a name that is no checkpoint's.

    Attributes:
        on_read: Called with how many bytes of a part were read, by any thread.
    """

    def __init__(self, url: str, storage: Storage | None = None) -> None:
        """Reads and writes nothing yet.

        Raises:
            CheckpointError: The URL names nothing that can be read or written.
        """
        self._storage = storage or storage_of(url)
        self.on_read: Callable[[int], object] | None = None
        self._claim: Owner | None = None
        self._owner_lock = threading.Lock()

    @property
    def url(self) -> str:
        """The folder, for people: without the password of its URL."""
        return self._storage.url

    # Reading

    def names(self) -> tuple[str, ...]:
        """Names of all that count, oldest first, also of incomplete ones."""
        undone = self.undone()
        return tuple(name for name in map(str, self._names()) if name not in undone)

    def undone(self) -> tuple[str, ...]:
        """Names of those that the job has gone back behind, oldest first."""
        owner = None
        with suppress(DamagedError):
            owner = self._owner()
        if owner is None or not owner.undone:
            return ()
        there = set(map(str, self._names()))
        return tuple(each for each in owner.undone if each in there)

    def newer_than(self, name: str) -> tuple[str, ...]:
        """Names of all that are newer than one, oldest first."""
        point = CheckpointName.checked(name)
        return tuple(str(each) for each in self._names() if each > point)

    def jobs(self) -> set[str]:
        """Ids of the jobs of which there are checkpoints whose manifest can be read."""
        names = map(str, self._names())
        return {job_id for job_id in map(self._job_of, names) if job_id}

    def manifest(self, name: str) -> Manifest:
        """Reads and checks a manifest.

        Raises:
            MissingError: There is no such checkpoint, or it is not complete.
            DamagedError: The manifest is not as it was written.
            FormatError: A newer release wrote it.
        """
        path = f"{CheckpointName.checked(name)}/{MANIFEST}"
        try:
            with self._reading(path):
                manifest = Manifest.from_json(self._read(path, MANIFEST_BYTES_MAX))
                if manifest.name != name:
                    raise DamagedError(f"it is the one of {manifest.name}")
                return manifest
        except MissingError:
            if self._storage.names(name):
                raise MissingError(
                    f"{name} in {self.url} is not complete, since it has no "
                    f"{MANIFEST}: it is being written, or that was interrupted. Use "
                    "another one"
                ) from None
            raise MissingError(
                f"there is no {name} in {self.url}; `psctl checkpoint list` shows "
                "what there is"
            ) from None

    def is_complete(self, name: str) -> bool:
        """Whether there is a manifest, good or not."""
        return MANIFEST in self._storage.names(name)

    def verify(self, name: str) -> tuple[str, ...]:
        """Reads every byte of a checkpoint; what is wrong with it, in words.

        Raises:
            FormatError: A newer release wrote it.
        """
        try:
            return self._problems(self.manifest(name))
        except (DamagedError, MissingError) as error:
            return (str(error),)

    def newest_good(
        self,
        *,
        takes_nonfinite: bool = False,
        check: Callable[[Manifest], object] = lambda _: None,
    ) -> Newest:
        """The newest checkpoint of which every byte is as it was written.

        Args:
            takes_nonfinite: Also one with values that are not finite.
            check: Raises `DamagedError` for one that the caller can't go on from.

        Raises:
            FormatError: A newer release wrote one that may be newer.
        """
        problems: dict[str, tuple[str, ...]] = {}
        for name in reversed(self.names()):
            try:
                manifest = self.manifest(name)
                check(manifest)
                found = self._problems(manifest)
            except (DamagedError, MissingError) as error:
                problems[name] = (str(error),)
                continue
            if not found and not (manifest.is_finite or takes_nonfinite):
                found = (f"{name} in {self.url} has values that are not finite",)
            if not found:
                return Newest(manifest, problems)
            problems[name] = found
        return Newest(None, problems)

    def open_part(self, name: str, part: FilePart) -> "PartReader":
        """Opens a part; its tensors are read, and checked, when they are asked for.

        Raises:
            DamagedError: It is not the part that the manifest names.
        """
        from pswire.checkpoint.parts import PartReader

        path = f"{CheckpointName.checked(name)}/{part.name}"
        with self._reading_part(path):
            self._check_size(path, part)
            file = self._opened(path)
            try:
                return PartReader(file, part, place=f"{path} in {self.url}")
            except BaseException:
                file.close()
                raise

    def state(self, manifest: Manifest) -> bytes:
        """Reads what the script has registered; empty for nothing.

        Raises:
            DamagedError: It is not what was written.
        """
        part = manifest.state
        if part is None:
            return b""
        path = f"{CheckpointName.checked(manifest.name)}/{part.name}"
        with self._reading_part(path):
            self._check_size(path, part)
            data = self._read(path, STATE_BYTES_MAX)
            digest = xxh3_128_hexdigest(data)
            if digest != part.digest:
                raise DamagedError(
                    f"its digest is {digest}, and was {part.digest} when it was written"
                )
            read_head(BytesIO(data), len(data))  # type: ignore[arg-type]
            return data

    # Writing

    def claim(self, job_id: str, token: str) -> None:
        """Makes the folder this coordinator's, before it writes there.

        Args:
            job_id: Its job.
            token: A text of its process alone. An earlier process of the same job,
                should it be alive, is refused from now on.

        Raises:
            OwnerError: The folder has checkpoints of another job.
        """
        for other in sorted(self.jobs() - {job_id}):
            raise OwnerError(
                f"{self.url} has checkpoints of job {printable(other)}, and this is "
                f"job {printable(job_id)}: name another folder, or let that job go on "
                "from there"
            )
        try:
            before = self._owner()
        except DamagedError:
            before = None  # whose the complete ones are, their manifests say
        if before is None or before.job_id != job_id:
            before = Owner(job_id, token)
        self._claim = replace(before, token=token)
        self._write_owner(self._claim)

    def begin(self, version: int) -> str:
        """Names a checkpoint that is to be written, and remembers that it is the job's.

        Args:
            version: Steps of all workers ever that will be in it.

        Raises:
            OwnerError: Another coordinator writes there now, or none has claimed it.
        """
        with self._owner_lock:
            owner = self._checked_owner()
            there = self._names()
            names = [*there, *map(CheckpointName.checked, owner.begun)]
            attempts = [name.attempt for name in names if name.version == version]
            name = str(CheckpointName(version, max(attempts, default=0) + 1))
            begun = [each for each in owner.begun if not self.is_complete(each)]
            begun = [*begun[1 - _BEGUN_COUNT_MAX :], name]
            left = set(map(str, there))
            undone = tuple(each for each in owner.undone if each in left)
            self._write_owner(replace(owner, begun=tuple(begun), undone=undone))
        failpoints.hit("checkpoint.begun")
        return name

    def return_to(self, manifest: Manifest) -> tuple[str, ...]:
        """Has no newer checkpoint count any more; returns their names, oldest first.

        The job goes back behind them. They are deleted by the next `prune`, so that
        until then it may still go to one of them.

        Raises:
            OwnerError: Another coordinator writes there now.
        """
        with self._owner_lock:
            owner = self._owner() if self._claim is None else self._checked_owner()
            owner = owner or Owner(manifest.job_id, "")
            undone = self.newer_than(manifest.name)
            self._write_owner(replace(owner, undone=undone))
        return undone

    def write_part(
        self,
        name: str,
        file_name: str,
        tensors: "Mapping[str, torch.Tensor]",
        metadata: Mapping[str, str],
    ) -> FilePart:
        """Writes the tensors of a shard; the file is durable when this returns.

        Args:
            name: The checkpoint.
            file_name: `part_name` of the shard.
            tensors: Contiguous tensors on the CPU, none of which shares memory with
                another, by `PartKey.text`.
            metadata: Texts that go with them.

        Raises:
            StorageError: It can't be written; there is no file of its name.
        """
        from pswire.checkpoint.parts import write_part

        if _PART.fullmatch(file_name) is None:
            raise CheckpointError(f"{printable(file_name)[:64]!r} names no part")
        stored = self._storage.write(
            f"{CheckpointName.checked(name)}/{file_name}",
            lambda path: write_part(path, tensors, metadata),
        )
        return FilePart(file_name, *stored)

    def write_state(self, name: str, data: bytes) -> FilePart:
        """Writes what the script has registered, as `write_part` does."""
        self._write(f"{CheckpointName.checked(name)}/{STATE}", data)
        return FilePart(STATE, len(data), xxh3_128_hexdigest(data))

    def commit(self, manifest: Manifest) -> None:
        """Completes a checkpoint whose parts are all written.

        Raises:
            OwnerError: Another coordinator writes there now.
            DamagedError: A part is missing, or has another size.
            StorageError: The manifest can't be written. Where a store did not answer,
                the checkpoint may be there all the same, and is whole then.
        """
        if self._claim is not None:
            self._checked_owner()
        for part in manifest.files:
            path = f"{manifest.name}/{part.name}"
            with self._reading_part(path):
                self._check_size(path, part)
        self._write(f"{manifest.name}/{MANIFEST}", manifest.to_json().encode())
        failpoints.hit("checkpoint.complete")

    def prune(self, job_id: str, keep: int) -> tuple[str, ...]:
        """Deletes what is not needed of a job; returns the names, oldest first.

        First the newest checkpoint with finite values is read back. Without a good one
        nothing is deleted, and never anything that is newer.

        Args:
            job_id: The job. What can't be shown to be of this job stays.
            keep: How many to keep, at least 1.

        Raises:
            OwnerError: Another coordinator writes there now.
        """
        if self._claim is not None:
            self._checked_owner()
        manifests = self._manifests_of(job_id)
        verified = next(
            (
                CheckpointName.checked(manifest.name)
                for manifest in reversed(manifests)
                if manifest.is_finite and not self._problems(manifest)
            ),
            None,
        )
        if verified is None:
            return ()
        held = [
            Held(
                CheckpointName.checked(manifest.name),
                is_whole=self._has_sizes(manifest),
                is_finite=manifest.is_finite,
            )
            for manifest in manifests
        ]
        held += [Held(name, is_whole=False) for name in self._interrupted(job_id)]
        going = set(superfluous(held, verified, keep))
        undone = [each for each in self.undone() if self._job_of(each) == job_id]
        going.update(map(CheckpointName.checked, undone))
        deleted = tuple(map(str, sorted(going)))
        for name in deleted:
            self._delete(name)
        return deleted

    # What is there

    def _names(self) -> list[CheckpointName]:
        found = map(CheckpointName.parse, self._storage.names())
        return sorted(name for name in found if name is not None)

    def _interrupted(self, job_id: str) -> Iterator[CheckpointName]:
        """What the job has begun and not completed, and folders without any file."""
        begun = self._begun(job_id)
        for name in map(str, self._names()):
            files = self._storage.names(name)
            if not files or (name in begun and MANIFEST not in files):
                yield CheckpointName.checked(name)

    def _begun(self, job_id: str) -> tuple[str, ...]:
        owner = self._owner()
        if owner is None or owner.job_id != job_id:
            return ()
        return owner.begun

    def _manifests_of(self, job_id: str) -> list[Manifest]:
        found = []
        for name in self.names():
            # Of one that can't be read nobody knows whose it is.
            with suppress(DamagedError, FormatError, MissingError):
                manifest = self.manifest(name)
                if manifest.job_id == job_id:
                    found.append(manifest)
        return found

    def _job_of(self, name: str) -> str | None:
        with suppress(DamagedError, FormatError, MissingError):
            return self.manifest(name).job_id
        return None

    def _problems(self, manifest: Manifest) -> tuple[str, ...]:
        """Reads all parts; what is wrong with them, in words."""
        known = {part.name for part in manifest.files}
        mixed = [
            f"{manifest.name}/{each} in {self.url} is of another checkpoint, since its "
            f"{MANIFEST} does not name it. Use another checkpoint"
            for each in self._storage.names(manifest.name)
            if _is_file(each) and each not in known
        ]
        with ThreadPoolExecutor(_READ_THREAD_COUNT) as pool:
            found = pool.map(
                lambda part: self._part_problem(manifest, part), manifest.files
            )
            return (*mixed, *filter(None, found))

    def _part_problem(self, manifest: Manifest, part: FilePart) -> str:
        path = f"{manifest.name}/{part.name}"
        try:
            if part == manifest.state:
                self.state(manifest)
                return ""
            with self._reading_part(path):
                self._check_size(path, part)
                with self._opened(path) as file:
                    check_contents(file, part)
        except DamagedError as error:
            return str(error)
        return ""

    def _opened(self, path: str) -> RawIOBase:
        file = self._storage.open(path)
        return file if self.on_read is None else _CountedFile(file, self.on_read)

    def _has_sizes(self, manifest: Manifest) -> bool:
        try:
            for part in manifest.files:
                self._check_size(f"{manifest.name}/{part.name}", part)
        except (DamagedError, MissingError):
            return False
        return True

    def _check_size(self, path: str, part: FilePart) -> None:
        byte_count = self._storage.size(path)
        if byte_count != part.byte_count:
            raise DamagedError(
                f"it has {byte_count} bytes, and had {part.byte_count} when it was "
                "written"
            )

    def _read(self, path: str, byte_count_max: int) -> bytes:
        byte_count = self._storage.size(path)
        if byte_count > byte_count_max:
            raise DamagedError(
                f"it has {byte_count} bytes, of at most {byte_count_max}"
            )
        with self._storage.open(path) as file:
            return file.read(byte_count) or b""

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Names the file in which something is wrong."""
        place = printable(f"{path} in {self.url}")
        try:
            yield
        except DamagedError as error:
            raise DamagedError(
                f"{place} is damaged: {error}. Use another checkpoint, or put the file "
                "back from a copy"
            ) from error
        except FormatError as error:
            raise FormatError(f"{place} can't be read: {error}") from error
        except OSError as error:
            raise StorageError(
                f"{place} can't be read: {error.strerror or error}; check the disk, "
                "and try again"
            ) from error

    @contextmanager
    def _reading_part(self, path: str) -> Iterator[None]:
        """Names the file in which something is wrong, also that it is not there."""
        with self._reading(path):
            try:
                yield
            except MissingError as error:
                raise DamagedError(str(error)) from error
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise DamagedError(
                    f"the disk does not return it: {error.strerror}"
                ) from error

    def _write(self, path: str, data: bytes) -> None:
        self._storage.write(path, lambda file: file.write_bytes(data))

    def _delete(self, name: str) -> None:
        """Its manifest last: until then it can be shown whose it is."""
        files = self._storage.names(name)
        for each in files:
            if _is_file(each) or _PARTIAL.fullmatch(each):
                self._storage.remove(f"{name}/{each}")
        if MANIFEST in files:
            self._storage.remove(f"{name}/{MANIFEST}")
        self._storage.remove_folder(name)

    # Whose it is

    def _owner(self) -> Owner | None:
        try:
            with self._reading(OWNER):
                return Owner.from_json(self._read(OWNER, _OWNER_BYTES_MAX))
        except MissingError:
            return None

    def _checked_owner(self) -> Owner:
        claim = self._claim
        if claim is None:
            raise OwnerError(f"{self.url} was not claimed before it is written")
        owner = self._owner()
        if owner is None:  # whoever has emptied the folder
            return claim
        if (owner.job_id, owner.token) != (claim.job_id, claim.token):
            raise OwnerError(
                f"another coordinator, of job {printable(owner.job_id)}, writes to "
                f"{self.url} now, and this one of job {printable(claim.job_id)} does "
                "so no more: stop one of the two, or give it another folder"
            )
        return owner

    def _write_owner(self, owner: Owner) -> None:
        self._write(OWNER, json.dumps(asdict(owner)).encode())


def _is_file(name: str) -> bool:
    """Whether it is the name of a part, or of registered state."""
    return name == STATE or _PART.fullmatch(name) is not None


class _CountedFile(RawIOBase):
    """A file that tells what is read of it."""

    def __init__(self, file: RawIOBase, on_read: Callable[[int], object]) -> None:
        self._file = file
        self._on_read = on_read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int | None:
        count = self._file.readinto(buffer)
        self._on_read(count or 0)
        return count

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def close(self) -> None:
        self._file.close()
        super().close()
