"""Readers of files that may be anybody's: checkpoints, state folders, histories."""

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from psctl.check_history import check_history
from psctl.failures import CommandError
from psctl.replay import ReplayReport
from psctl.tls import AUTHORITY, CA_FILE, CERTIFICATE_FILE, certificates_text, listed
from psserver.coordinator.core.coordinator_effects import Persist
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.storage.job_store import DATABASE, JobStore
from psserver.coordinator.storage.saved_job import saved_job_of
from psserver.edge.state_folder import StateFolderError
from psserver.shard.core.core_image import CoreImage
from psserver.shard.host.recording import MAGIC, RecordingError
from psserver.shard.host.recording import _sealed as _sealed_entry
from psserver.shard.host.replaying import ShardReplay, Until
from psserver.shard.tensors.saved_images import SavedImages
from psserver.shard.tensors.shard_optimizers import DeclaredOptimizers
from pswire.checkpoint.errors import CheckpointError
from pswire.checkpoint.folder import CheckpointFolder, Owner
from pswire.checkpoint.manifest import (
    MANIFEST,
    CheckpointName,
    FilePart,
    Manifest,
    _sealed,
)
from pswire.checkpoint.part_head import DIGESTS, encode_head, read_head
from pswire.checkpoint.place import CheckpointPlace
from pswire.checkpoint.registered_state import decode_states, encode_states
from pswire.leased_data import EpochShape, RecordedSplit
from pswire.security.certificates import date_text, read_pem
from pswire.security.credentials import (
    TOKEN_FILE_VARIABLE,
    Credentials,
    CredentialsError,
    TlsFiles,
)
from pswire.security.token_store import TokenStore
from psworker.snapshots.saved_optimizers import read_optimizers
from psworker.snapshots.saved_snapshot import read_saved
from tests.doubles.checkpoints import TERMS, manifest_of
from tests.doubles.core_values import TERMS as JOB_TERMS
from tests.doubles.core_values import record
from tests.fuzz.target import Target, same, taken

DAMAGED: Final = (CheckpointError,)
PART: Final = "part-00000-of-00001.safetensors"


@cache
def scratch() -> Path:
    """A folder of this process, in memory where there is such."""
    memory = Path("/dev/shm")
    parent = str(memory) if memory.is_dir() else None
    made = tempfile.TemporaryDirectory(prefix="paramserver-fuzz-", dir=parent)
    _kept.append(made)
    return Path(made.name)


_kept: Final[list[tempfile.TemporaryDirectory[str]]] = []
"""Until the process ends."""


@contextmanager
def _new_folder(name: str) -> Iterator[Path]:
    folder = scratch() / name
    shutil.rmtree(folder, ignore_errors=True)  # of an input that was given up
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder)


def _take_head(data: bytes) -> None:
    head = read_head(BytesIO(data), len(data))  # type: ignore[arg-type]
    with taken():
        tensors = {
            name: (place.element_type, place.shape)
            for name, place in sorted(
                head.tensors.items(), key=lambda each: each[1].start
            )
        }
        written = encode_head(tensors, head.metadata)
        size = len(written) + sum(place.byte_count for place in head.tensors.values())
        file = BytesIO(written + bytes(size - len(written)))
        again = read_head(file, size)  # type: ignore[arg-type]
        assert again.metadata == head.metadata
        assert {
            name: (place.element_type, place.shape)
            for name, place in again.tensors.items()
        } == tensors


def sealed_part(data: bytes) -> tuple[bytes, FilePart]:
    """A part with right digests, as somebody writes it who can change a file.

    Its head's is in the manifest, and in the head are those of tensors. Bytes that are
    no head at all stay as they are.
    """
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(data[8:start])
        head["__metadata__"][DIGESTS] = json.dumps(
            {
                name: xxh3_64_hexdigest(data[start + begin : start + end])
                for name, place in head.items()
                if name != "__metadata__"
                for begin, end in [place["data_offsets"]]
            }
        )
        text = json.dumps(head).encode()
        data = len(text).to_bytes(8, "little") + text + data[start:]
    except (LookupError, RecursionError, TypeError, ValueError):
        start = min(len(data), 8 + int.from_bytes(data[:8], "little"))
    head_stop = min(len(data), 8 + int.from_bytes(data[:8], "little"))
    return data, FilePart(PART, len(data), xxh3_128_hexdigest(data[:head_stop]))


def _take_part(data: bytes) -> None:
    """A part of a sealed checkpoint, as a shard and as psctl read it."""
    written, part = sealed_part(data)
    manifest = manifest_of([part])
    with _new_folder("checkpoints") as folder:
        (folder / manifest.name).mkdir()
        (folder / manifest.name / PART).write_bytes(written)
        (folder / manifest.name / MANIFEST).write_text(manifest.to_json())
        readers: tuple[Callable[[], object], ...] = (
            lambda: _as_a_shard(str(folder), manifest),
            lambda: read_saved(CheckpointFolder(str(folder)), manifest),
            lambda: read_optimizers(CheckpointFolder(str(folder)), manifest),
        )
        refused: list[CheckpointError] = []
        for reader in readers:
            try:
                reader()
            except CheckpointError as error:
                refused.append(error)
        if refused:
            raise refused[0]


def _as_a_shard(url: str, manifest: Manifest) -> None:
    declared = DeclaredOptimizers(TERMS.schema, TERMS.optimizers)
    place = CheckpointPlace(url, manifest.name)
    with SavedImages(place, TERMS.schema, declared) as images:
        images.core()
        for chunk in manifest.placement().chunks:
            images.image(chunk)


def _take_manifest(data: bytes) -> None:
    """The body of a manifest, sealed as somebody does who can change a file."""
    try:
        text = _sealed(1, json.loads(data))
        text.encode()
    except (RecursionError, ValueError):
        Manifest.from_json(data)
        return
    manifest = Manifest.from_json(text)
    with taken():
        assert manifest.to_json() == text
    saved_job_of(manifest, "/checkpoints")


def _take_owner(data: bytes) -> None:
    owner = Owner.from_json(data)
    with taken():
        assert all(map(CheckpointName.parse, (*owner.begun, *owner.undone)))


def _take_name(data: bytes) -> None:
    name = CheckpointName.checked(data.decode("utf-8", "surrogateescape"))
    with taken():
        assert str(name).encode() == data


def _take_core_image(data: bytes) -> None:
    image = CoreImage.from_json(data.decode("utf-8", "replace"))
    with taken():
        assert same(CoreImage.from_json(image.to_json()), image)


def _take_registered(data: bytes) -> None:
    states = decode_states(data)
    with taken():
        assert same(decode_states(encode_states(states)), states)


FACTS: Final = (
    *("job", "model", "record", "shards", "incarnations", "worker_processes"),
    *("enrolments", "step_rules", "start_point", "later_starts", "format"),
    *("epochs", "splits"),
)


def new_state(folder: Path) -> None:
    """The state folder of a small job."""
    with JobStore(folder) as store:
        store.save_job(job_id="job", job_seed=7, shard_count=1)
        store.save_step_rules({"step_atomicity": "chunk"})
        shape = EpochShape(position_count=8, batch_size=2, drop_last=False)
        store.write(
            Persist(
                record=record({"a": 0}),
                terms=JOB_TERMS,
                incarnations={"a": 1},
                epochs=(EpochLedger("loader", 0, shape),),
                split=RecordedSplit(name="split", digest="0" * 64, item_count=8),
            )
        )


@cache
def _database() -> bytes:
    with _new_folder("state") as folder:
        new_state(folder)
        return (folder / DATABASE).read_bytes()


def _take_state_folder(data: bytes) -> None:
    """A row of a coordinator's database, or with another first byte all of its file."""
    which, value = (data[0] if data else 0), data[1:]
    with _new_folder("changed") as folder:
        file = folder / DATABASE
        if which >= len(FACTS):
            file.write_bytes(value)
        else:
            file.write_bytes(_database())
            name = FACTS[which]
            text = value.decode("utf-8", "replace")
            with closing(sqlite3.connect(file)) as db:
                if name in ("epochs", "splits"):
                    db.execute(f"UPDATE {name} SET value = ?", (text,))
                else:
                    db.execute(
                        "INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, text)
                    )
                db.commit()
        with JobStore(folder) as store:
            store.load()
            store.load_epochs()
            store.load_splits()


def _take_history(data: bytes) -> None:
    with _new_folder("histories") as folder:
        (folder / "shard-0.jsonl").write_bytes(data)
        report = check_history([folder])
        with taken():
            json.dumps(report.to_json())
            report.to_text().encode("utf-8", "strict")


def sealed_recording(data: bytes) -> bytes:
    """A recording with right digests, as somebody writes it who can change a file.

    An input has two lines for each entry: what it says, and its bytes in hexadecimal.
    One that begins as a file does is a file.
    """
    if data.startswith(MAGIC[:4]):
        return data
    pieces: list[bytes | memoryview] = [MAGIC]
    lines = data.split(b"\n")
    for line, digits in zip(lines[::2], lines[1::2], strict=False):
        try:
            body = bytes.fromhex(digits.decode("ascii", "replace"))
        except ValueError:
            body = digits
        pieces += _sealed_entry(line, [body])
    return b"".join(pieces)


def _take_recording(data: bytes) -> None:
    """What a shard has recorded, as `psctl replay` reads it."""
    with _new_folder("recordings") as folder:
        path = folder / "shard-0-1.recording"
        path.write_bytes(sealed_recording(data))
        shard = ShardReplay(path)
        shard.run(Until())
        with taken():
            report = ReplayReport([shard], norm_max=1.0, shows_pushes=True)
            json.dumps(report.to_json(), allow_nan=False)
            report.to_text().encode("utf-8", "strict")
        if shard.damage:
            raise RecordingError(shard.damage)


def _take_tokens(data: bytes) -> None:
    """The file by which daemons know tokens."""
    with _new_folder("tokens") as folder:
        store = TokenStore.read(_private(folder / "tokens.json", data))
    with taken():
        assert TokenStore.parse(store.to_bytes()) == store


def _take_token_file(data: bytes) -> None:
    with _new_folder("token") as folder:
        file = _private(folder / "token", data)
        credentials = Credentials.from_environment({TOKEN_FILE_VARIABLE: str(file)})
        with taken():
            assert credentials.token is not None
            ((_, shown),) = credentials.token.metadata()
            assert shown.isascii()
            assert shown.isprintable()


def _take_certificate(data: bytes) -> None:
    """Certificates, as a process uses them and as `psctl tls show` lists them."""
    with _new_folder("tls") as folder:
        (folder / AUTHORITY).mkdir()
        (folder / "worker").mkdir()
        for file in (
            folder / AUTHORITY / CA_FILE,
            folder / "worker" / CERTIFICATE_FILE,
        ):
            file.write_bytes(data)
        refused = None
        try:
            pem = read_pem(TlsFiles(ca=folder / AUTHORITY / CA_FILE))
            with taken():
                date_text(pem.ends_at_s)
        except CredentialsError as error:
            refused = error
        certificates_text(listed(folder))
        if refused is not None:
            raise refused


def _private(file: Path, data: bytes) -> Path:
    file.touch(mode=0o600)
    file.write_bytes(data)
    return file


FILES: Final = (
    Target("head", _take_head, DAMAGED),
    Target("part", _take_part, DAMAGED),
    Target("manifest", _take_manifest, DAMAGED),
    Target("owner", _take_owner, DAMAGED),
    Target("checkpoint_name", _take_name, DAMAGED),
    Target("core_image", _take_core_image, (ValueError,)),
    Target("registered_state", _take_registered, DAMAGED),
    Target("state_folder", _take_state_folder, (StateFolderError,)),
    Target("tokens", _take_tokens, (CredentialsError,)),
    Target("token_file", _take_token_file, (CredentialsError,)),
    Target("certificate", _take_certificate, (CredentialsError, CommandError)),
    Target("history", _take_history, (CommandError,)),
    Target("recording", _take_recording, (RecordingError,)),
)
