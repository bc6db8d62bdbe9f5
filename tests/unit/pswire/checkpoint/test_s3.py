"""Checkpoints on an S3 server whose requests fail, hang, are cut, and arrive twice.

The client is s3fs, as users have it. Its own further tries are switched off, but where
a test says so: what is tried here is what is built on it.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pswire.checkpoint.errors import DamagedError, MissingError, StorageError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import MANIFEST, part_name
from pswire.checkpoint.storage import ObjectStorage
from tests.doubles.checkpoints import save, tensors_of
from tests.doubles.s3_server import BUCKET, Fault, S3Server

s3fs = pytest.importorskip("s3fs", reason="pip install 'paramserver[s3]'")

HANG_S = 1.0
"""After which a client gives up a request, in tests where some hang."""

TIMEOUT_S = 60.0
"""Likewise in all others, which no busy machine takes."""

ROOT = "run"
PATH = "step-000000000500/file"
ALWAYS = 12
"""More than all tries of a request, some of which aiohttp makes by itself."""


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[S3Server, dict[float, Any]]]:
    """A server, and file systems of it by the time that they have for a request."""
    with S3Server().running() as server:
        found = {}
        for timeout_s in (HANG_S, TIMEOUT_S):
            retries = {"max_attempts": 0}
            found[timeout_s] = files = s3fs.S3FileSystem(
                endpoint_url=server.url,
                key="key",
                secret="secret",
                skip_instance_cache=True,
                config_kwargs={"read_timeout": timeout_s, "retries": retries},
            )
            files.retries = 1
        yield server, found
        for files in found.values():
            if files._s3 is not None:
                files.close_session(files.loop, files.s3)


@pytest.fixture
def files(
    running: tuple[S3Server, dict[float, Any]], request: pytest.FixtureRequest
) -> Any:  # noqa: ANN401
    """The file system, which gives up soon where the test's fault is to hang."""
    given = getattr(request.node, "callspec", None)
    hangs = given is not None and given.params.get("fault") is Fault.HANGS
    return running[1][HANG_S if hangs else TIMEOUT_S]


@pytest.fixture
def server(running: tuple[S3Server, dict[float, Any]]) -> S3Server:
    """The server, with an empty bucket."""
    server, _ = running
    server.clear()
    return server


@pytest.fixture
def storage(server: S3Server, files: Any) -> ObjectStorage:  # noqa: ANN401
    files.invalidate_cache()
    return ObjectStorage(
        files, f"{BUCKET}/{ROOT}", f"s3://{BUCKET}/{ROOT}", pause=lambda _: None
    )


@pytest.fixture
def folder(storage: ObjectStorage) -> CheckpointFolder:
    folder = CheckpointFolder("", storage)
    folder.claim("job", "token")
    return folder


def filled(data: bytes) -> Callable[[Path], None]:
    def fill(path: Path) -> None:
        path.write_bytes(data)

    return fill


def read(storage: ObjectStorage) -> bytes:
    with storage.open(PATH) as file:
        return file.read() or b""


def test_what_is_written_is_read_back_and_listed(
    server: S3Server, storage: ObjectStorage
) -> None:
    assert storage.names() == []
    with pytest.raises(MissingError):
        storage.size(PATH)

    storage.write(PATH, filled(b"text"))

    assert server.objects == {f"{ROOT}/{PATH}": b"text"}
    assert read(storage) == b"text"
    assert storage.names() == ["step-000000000500"]
    assert storage.names("step-000000000500") == ["file"]
    with pytest.raises(DamagedError, match="folder"):
        storage.size("step-000000000500")
    with storage.open(PATH) as file:
        assert (file.seek(1), file.read(2)) == (1, b"ex")

    storage.remove(PATH)
    storage.remove(PATH)
    storage.remove_folder("step-000000000500")
    assert storage.names() == []


def test_names_with_what_urls_escape_are_listed_over_pages(
    server: S3Server, storage: ObjectStorage
) -> None:
    names = ["a b", "a%20b", "a+b", "a?b#c", "généré", "ф", "z&<>"]
    for name in names:
        storage.write(f"folder/{name}", filled(name.encode()))
    server.page_size = 2

    assert storage.names("folder") == sorted(names)
    for name in names:
        with storage.open(f"folder/{name}") as file:
            assert file.read() == name.encode()


def faults_of_two_tries(fault: Fault) -> list[Fault]:
    """Of three; or of one, where the machine may stand still for as long in another."""
    return [fault] if fault is Fault.HANGS else [fault, fault]


@pytest.mark.parametrize("fault", Fault)
def test_a_write_of_which_requests_fail_twice_is_whole(
    server: S3Server, storage: ObjectStorage, fault: Fault
) -> None:
    faults = faults_of_two_tries(fault)
    server.fail("PUT", "file", *faults)
    server.fail("HEAD", "file", *faults)

    storage.write(PATH, filled(b"text"))
    server.deliver()

    assert read(storage) == b"text"
    if fault is Fault.HANGS:
        assert server.count("PUT") > 1
    else:
        assert server.count("PUT") == (1 if fault is Fault.TWICE else 3)


@pytest.mark.parametrize("fault", Fault)
def test_reads_lists_and_deletions_that_fail_twice_are_made_again(
    server: S3Server, storage: ObjectStorage, fault: Fault
) -> None:
    storage.write(PATH, filled(b"text"))
    for kind in ("GET", "LIST", "DELETE"):
        server.fail(kind, "", *faults_of_two_tries(fault))

    assert read(storage) == b"text"
    assert storage.names() == ["step-000000000500"]
    storage.remove(PATH)
    server.deliver()
    assert server.objects == {}


@pytest.mark.parametrize("fault", [Fault.DELAYED, Fault.CUT])
def test_a_third_failure_is_named_and_nothing_is_there(
    server: S3Server, storage: ObjectStorage, fault: Fault
) -> None:
    server.fail("PUT", "file", *[fault] * ALWAYS)

    with pytest.raises(StorageError, match=rf"s3://bucket/run/{PATH} can't be written"):
        storage.write(PATH, filled(b"text"))
    assert server.objects == {}


@pytest.mark.parametrize("fault", [Fault.HANGS])
def test_a_store_that_hangs_for_long_is_tried_once(
    server: S3Server,
    files: Any,  # noqa: ANN401
    fault: Fault,
) -> None:
    storage = ObjectStorage(files, f"{BUCKET}/{ROOT}", "s3://", try_s_max=HANG_S / 2)
    server.fail("LIST", "", fault)

    with pytest.raises(StorageError, match="can't be listed"):
        storage.names()
    assert server.count("LIST") == 1


def test_a_bucket_that_is_not_there_is_named(files: Any) -> None:  # noqa: ANN401
    storage = ObjectStorage(files, "no/run", "s3://no/run", pause=lambda _: None)

    with pytest.raises(StorageError, match="knows no such place; make its bucket"):
        storage.write(PATH, filled(b"text"))


@pytest.mark.parametrize("fault", [Fault.HANGS])
def test_an_empty_folder_that_can_not_be_looked_at_is_left(
    server: S3Server, storage: ObjectStorage, fault: Fault
) -> None:
    server.fail("HEAD", "step-000000000500", *[fault] * 3)

    storage.remove_folder("step-000000000500")

    assert server.count("HEAD") == 3


# Uploads in parts, which s3fs makes of files of 100 MB


@pytest.fixture
def chunk_bytes(
    files: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """Bytes of one part of an upload."""
    size = 1 << 16
    monkeypatch.setattr(files, "put_file", partial(files.put_file, chunksize=size))
    return size


@pytest.mark.parametrize("fault", [each for each in Fault if each is not Fault.HANGS])
@pytest.mark.parametrize("kind", ["CREATE", "PART", "COMPLETE"])
def test_an_upload_in_parts_is_whole_whichever_request_fails(
    server: S3Server,
    storage: ObjectStorage,
    chunk_bytes: int,
    kind: str,
    fault: Fault,
) -> None:
    data = bytes(chunk_bytes) + bytes(range(256)) * (chunk_bytes // 256) + b"rest"
    server.fail(kind, "file", fault)

    storage.write(PATH, filled(data))
    server.deliver()

    assert storage.size(PATH) == len(data)
    assert server.objects == {f"{ROOT}/{PATH}": data}
    if (kind, fault) == ("COMPLETE", Fault.TWICE):
        assert server.count("CREATE") == 2, "answered: no such upload"


# Whole checkpoints


def test_the_manifest_is_put_when_all_else_is_there(
    server: S3Server, folder: CheckpointFolder
) -> None:
    server.log.clear()
    server.fail("PUT", part_name(1, 2), Fault.DELAYED, Fault.ANSWER_LOST)

    name = save(folder, 100, states={"counts": {"step": 1}})

    puts = [key for kind, key in server.log if kind == "PUT"]
    assert puts.pop() == f"{ROOT}/{name}/{MANIFEST}"
    server.deliver()
    assert folder.verify(name) == ()


@pytest.mark.parametrize("fault", Fault)
def test_a_manifest_whose_put_fails_is_there_whole_or_not_at_all(
    server: S3Server, folder: CheckpointFolder, fault: Fault
) -> None:
    before = save(folder, 100)
    server.fail("PUT", MANIFEST, *[fault] * ALWAYS)
    is_late = fault in (Fault.ANSWER_LOST, Fault.HANGS)
    if fault is Fault.TWICE:
        save(folder, 200)
    else:
        with pytest.raises(StorageError, match=f"{MANIFEST} can't be written"):
            save(folder, 200)

    found = folder.newest_good().manifest
    assert found is not None
    assert (found.name != before) == (is_late or fault is Fault.TWICE)

    # The next try has a name of its own, so that a put that arrives late spoils none.
    server.heal()
    again = save(folder, 200)
    server.deliver()
    for name in (again, before):
        assert folder.verify(name) == ()
    newest = folder.newest_good().manifest
    assert newest is not None
    assert newest.name == again == "step-000000000200-2"


def test_a_reader_finds_a_whole_one_while_others_are_made_and_deleted(
    server: S3Server, folder: CheckpointFolder, storage: ObjectStorage
) -> None:
    server.page_size = 3
    save(folder, 1)
    has_ended = threading.Event()
    seen: list[int] = []

    def write() -> None:
        try:
            for version in range(2, 5):
                save(folder, version)
                folder.prune("job", 2)
        finally:
            has_ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    reader = CheckpointFolder("", storage)
    while not has_ended.is_set():
        newest = reader.newest_good().manifest
        assert newest is not None
        seen.append(newest.version)
    writer.join()

    assert seen == sorted(seen)
    assert reader.names() == tuple(f"step-{v:012}" for v in (3, 4))


def test_a_prune_that_fails_half_way_is_finished_by_the_next(
    server: S3Server, folder: CheckpointFolder
) -> None:
    names = [save(folder, version) for version in (1, 2, 3)]
    server.fail("DELETE", part_name(1, 2), *[Fault.ANSWER_LOST] * 3)

    with pytest.raises(StorageError, match="can't be deleted"):
        folder.prune("job", 2)
    assert folder.names() == tuple(names), "its manifest goes last"

    assert folder.prune("job", 2) == (names[0],)
    assert folder.names() == tuple(names[1:])
    assert [each for each in server.objects if names[0] in each] == []


def test_a_part_that_is_read_again_after_a_cut_is_as_it_was_written(
    server: S3Server, folder: CheckpointFolder
) -> None:
    name = save(folder, 100)
    part = folder.manifest(name).parts[0]
    server.fail("GET", part.name, Fault.CUT, Fault.DELAYED)

    with folder.open_part(name, part) as reader:
        for key, tensor in tensors_of(0, 100).items():
            assert reader.tensor(key).equal(tensor)
