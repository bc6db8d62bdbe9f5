"""A folder of checkpoints: what is good, what is refused, and what goes."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pswire.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    FormatError,
    MissingError,
    OwnerError,
    StorageError,
)
from pswire.checkpoint.folder import OWNER, CheckpointFolder
from pswire.checkpoint.manifest import STATE, FilePart, part_name
from pswire.checkpoint.registered_state import decode_states
from pswire.checkpoint.storage import LocalStorage, ObjectStorage
from tests.doubles.checkpoints import manifest_of, save, tensors_of
from tests.doubles.failing_store import FailingStore
from tests.doubles.full_disk import full_disk

PART = part_name(0, 2)


@pytest.fixture(params=["local", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointFolder:
    folder = (
        CheckpointFolder(str(tmp_path / "checkpoints"))
        if request.param == "local"
        else CheckpointFolder("", ObjectStorage(FailingStore(), "/root", "failing://"))
    )
    folder.claim("job", "token")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def local(root: Path) -> CheckpointFolder:
    folder = CheckpointFolder(str(root))
    folder.claim("job", "token")
    return folder


def test_what_was_saved_is_the_newest_and_is_read_back(
    folder: CheckpointFolder,
) -> None:
    save(folder, 100)
    name = save(folder, 500)

    assert folder.names() == ("step-000000000100", "step-000000000500")
    found = folder.newest_good()
    assert found.problems == {}
    manifest = found.manifest
    assert manifest is not None
    assert manifest == folder.manifest(name)
    assert folder.verify(name) == ()
    for index, part in enumerate(manifest.parts):
        with folder.open_part(name, part) as reader:
            assert reader.metadata == {"core": f"shard {index} at 500"}
            for key, tensor in tensors_of(index, 500).items():
                assert torch.equal(reader.tensor(key), tensor)


def test_registered_state_is_read_back_and_goes_with_its_checkpoint(
    folder: CheckpointFolder,
) -> None:
    states = [{"counters": {"step": version}} for version in (100, 500)]
    names = [save(folder, each["counters"]["step"], states=each) for each in states]

    found = [folder.state(folder.manifest(name)) for name in names]

    assert [decode_states(data) for data in found] == states
    assert folder.verify(names[1]) == ()
    assert folder.prune("job", 1) == (names[0],)
    assert folder.names() == (names[1],)


def test_a_checkpoint_without_registered_state_is_whole(
    folder: CheckpointFolder,
) -> None:
    name = save(folder, 100)

    assert folder.state(folder.manifest(name)) == b""
    assert folder.verify(name) == ()


def test_an_empty_folder_has_none(folder: CheckpointFolder) -> None:
    assert folder.names() == ()
    assert folder.newest_good() == (None, {})
    with pytest.raises(MissingError, match="there is no step-000000000500"):
        folder.manifest("step-000000000500")


def test_a_folder_that_is_not_there_is_empty_and_is_not_made(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path / "no" / "such"))

    assert folder.names() == ()
    assert folder.newest_good().manifest is None
    assert folder.prune("job", 3) == ()
    assert list(tmp_path.iterdir()) == []


def test_the_same_version_gets_another_name(folder: CheckpointFolder) -> None:
    names = [save(folder, 500), folder.begin(500), folder.begin(500), save(folder, 500)]

    assert names == [f"step-000000000500{end}" for end in ("", "-2", "-3", "-4")]
    newest = folder.newest_good()
    assert newest.manifest is not None
    assert newest.manifest.name == names[-1]


def test_without_a_manifest_a_checkpoint_is_not_there(folder: CheckpointFolder) -> None:
    save(folder, 100)
    name = folder.begin(500)
    folder.write_part(name, PART, tensors_of(0, 500), {})

    newest = folder.newest_good()

    assert newest.manifest is not None
    assert newest.manifest.version == 100
    (problem,) = newest.problems[name]
    assert "is not complete, since it has no manifest.json" in problem
    with pytest.raises(MissingError, match="is not complete"):
        folder.manifest(name)


def test_no_checkpoint_is_completed_without_its_parts(folder: CheckpointFolder) -> None:
    name = folder.begin(500)
    part = folder.write_part(name, PART, tensors_of(0, 500), {})
    missing = FilePart(part_name(1, 2), 300, "0" * 32)
    other_size = FilePart(PART, part.byte_count + 1, part.digest)

    for parts in ([part, missing], [other_size, missing]):
        with pytest.raises(DamagedError, match=r"it is missing|it has \d+ bytes"):
            folder.commit(manifest_of(parts, name))
    with pytest.raises(MissingError):
        folder.manifest(name)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weight": 1.0}))


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def folder_as_link(path: Path) -> None:
    path.parent.rename(path.parent.parent / "elsewhere")
    path.parent.symlink_to(path.parent.parent / "elsewhere")


DAMAGES: list[Callable[[Path], None]] = [
    flip, cut, lengthen, empty, pickled, link, as_folder, Path.unlink, folder_as_link,
]  # fmt: skip


@pytest.mark.parametrize("file", ["manifest.json", PART, STATE])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_a_damaged_one_is_named_and_the_one_before_it_is_used(
    root: Path, local: CheckpointFolder, damage: Callable[[Path], None], file: str
) -> None:
    save(local, 100)
    name = save(local, 500, states={"counters": {"step": 500}})
    manifest = local.manifest(name)
    part = manifest.parts[0]
    damage(root / name / file)
    before = contents_of(root)

    newest = local.newest_good()

    assert newest.manifest is not None
    assert newest.manifest.version == 100
    assert list(newest.problems) == [name]
    assert local.verify(name) == newest.problems[name]
    (problem,) = newest.problems[name]
    assert problem.startswith((f"{name}/", f"{name} in "))
    assert str(root) in problem
    assert "another" in problem
    if file == PART:
        with pytest.raises(DamagedError):
            read_all(local, name, part)
    if file == STATE:
        with pytest.raises(DamagedError):
            local.state(manifest)
    assert contents_of(root) == before


def read_all(folder: CheckpointFolder, name: str, part: FilePart) -> None:
    with folder.open_part(name, part) as reader:
        for key in tensors_of(0, 500):
            reader.tensor(key)


def contents_of(root: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def test_a_part_of_another_checkpoint_is_named(
    root: Path, local: CheckpointFolder
) -> None:
    name = save(local, 500)
    shutil.copy(root / name / PART, root / name / part_name(0, 3))
    (root / name / "notes.txt").touch()

    (problem,) = local.verify(name)
    assert f"{part_name(0, 3)} in {root} is of another checkpoint" in problem


def test_parts_of_two_checkpoints_are_no_checkpoint(
    root: Path, local: CheckpointFolder
) -> None:
    save(local, 100)
    name = save(local, 500)
    shutil.copy(root / "step-000000000100" / PART, root / name / PART)

    (problem,) = local.verify(name)
    assert "the digest of its head is" in problem


def test_a_manifest_of_another_checkpoint_is_damage(
    root: Path, local: CheckpointFolder
) -> None:
    save(local, 100)
    shutil.copytree(root / "step-000000000100", root / "step-000000000500")

    (problem,) = local.verify("step-000000000500")
    assert "it is the one of step-000000000100" in problem


def test_a_newer_format_is_refused_and_not_skipped(
    root: Path, local: CheckpointFolder
) -> None:
    save(local, 100)
    name = save(local, 500)
    newer = json.dumps({"format": 2, "manifest": {}, "digest": ""})
    (root / name / "manifest.json").write_text(newer)

    for call in (local.newest_good, lambda: local.verify(name)):
        with pytest.raises(
            FormatError, match=rf"{name}/manifest.json in .* has format 2.* up to 1"
        ):
            call()
    assert local.prune("job", 1) == ()


def test_values_that_are_not_finite_are_not_gone_on_from(
    folder: CheckpointFolder,
) -> None:
    save(folder, 100)
    name = save(folder, 500, is_finite=False)

    newest = folder.newest_good()
    assert newest.manifest is not None
    assert newest.manifest.version == 100
    assert "not finite" in newest.problems[name][0]

    asked_for = folder.newest_good(takes_nonfinite=True).manifest
    assert asked_for is not None
    assert asked_for.name == name


@pytest.mark.parametrize("name", ["../../etc", "step-000000000500\0", "", "s" * 300])
def test_other_names_reach_no_file(folder: CheckpointFolder, name: str) -> None:
    part = FilePart(PART, 1, "0" * 32)
    for call in (
        lambda: folder.manifest(name),
        lambda: folder.verify(name),
        lambda: folder.open_part(name, part),
        lambda: folder.write_part(name, PART, {}, {}),
        lambda: folder.write_part("step-000000000500", name, {}, {}),
    ):
        with pytest.raises(CheckpointError, match="name"):
            call()


# Pruning


def test_the_newest_stay_and_the_others_go(folder: CheckpointFolder) -> None:
    names = [save(folder, version) for version in (1, 2, 3, 4)]

    assert folder.prune("job", 2) == tuple(names[:2])
    assert folder.names() == tuple(names[2:])
    assert [folder.verify(name) for name in names[2:]] == [(), ()]
    assert folder.prune("job", 2) == ()


def test_nothing_goes_for_a_newer_one_that_is_damaged(
    root: Path, local: CheckpointFolder
) -> None:
    names = [save(local, version) for version in (1, 2, 3)]
    flip(root / names[2] / PART)

    assert local.prune("job", 1) == (names[0],)
    assert local.names() == tuple(names[1:])

    flip(root / names[1] / PART)
    assert local.prune("job", 1) == ()


def test_a_diverged_run_leaves_what_it_can_go_back_to(
    folder: CheckpointFolder,
) -> None:
    names = [save(folder, version, is_finite=version < 3) for version in (1, 2, 3, 4)]

    assert folder.prune("job", 1) == (names[0], names[2])
    newest = folder.newest_good().manifest
    assert newest is not None
    assert newest.name == names[1]


def test_what_was_interrupted_goes_when_a_newer_one_is_whole(
    folder: CheckpointFolder,
) -> None:
    name = folder.begin(1)
    folder.write_part(name, PART, tensors_of(0, 1), {})
    newer = folder.begin(9)
    folder.write_part(newer, PART, tensors_of(0, 9), {})
    assert folder.prune("job", 1) == ()
    kept = save(folder, 5)

    assert folder.prune("job", 1) == (name,)
    assert folder.names() == (kept, newer)


def test_nothing_of_others_goes(root: Path, local: CheckpointFolder) -> None:
    """Not another job's, nor what nobody claims, nor files beside the parts."""
    save(local, 1)
    save(local, 2)
    other = CheckpointFolder(str(root.parent / "other"))
    other.claim("other", "token")
    name = save(other, 1, job_id="other")
    shutil.copytree(root.parent / "other" / name, root / "step-000000000000-2-x")
    moved = root / f"{name}-7"
    shutil.copytree(root.parent / "other" / name, moved)
    text = (moved / "manifest.json").read_text()
    (moved / "manifest.json").write_text(text.replace(name, moved.name))
    unclaimed = root / "step-000000000000"
    unclaimed.mkdir()
    (unclaimed / PART).touch()
    (root / "step-000000000001" / "notes.txt").write_text("mine")

    assert local.prune("job", 1) == ("step-000000000001",)

    assert (root / "step-000000000001" / "notes.txt").read_text() == "mine"
    assert not (root / "step-000000000001" / PART).exists()
    assert (unclaimed / PART).exists()
    assert (moved / PART).exists()
    assert (root / "step-000000000000-2-x" / PART).exists()


# Whose it is


def test_a_folder_with_checkpoints_of_another_job_is_refused(
    folder: CheckpointFolder,
) -> None:
    save(folder, 1)

    with pytest.raises(
        OwnerError, match="has checkpoints of job job, and this is job other"
    ):
        folder.claim("other", "token")
    save(folder, 2)


def test_a_folder_in_which_a_job_has_saved_nothing_is_anyones(
    folder: CheckpointFolder,
) -> None:
    folder.claim("other", "token")

    save(folder, 1, job_id="other")


def test_a_coordinator_whose_folder_was_taken_over_writes_no_more(
    root: Path, local: CheckpointFolder
) -> None:
    name = local.begin(1)
    local.write_part(name, PART, tensors_of(0, 1), {})
    part = local.write_part(name, part_name(1, 2), tensors_of(1, 1), {})
    successor = CheckpointFolder(str(root))
    successor.claim("job", "another token")

    for call in (
        lambda: local.begin(2),
        lambda: local.commit(manifest_of([part, part], name)),
        lambda: local.prune("job", 1),
    ):
        with pytest.raises(OwnerError, match="another coordinator, of job job, writes"):
            call()

    kept = save(successor, 5)
    assert successor.prune("job", 1) == (name,)
    assert successor.names() == (kept,)


def test_nothing_begins_in_a_folder_that_nobody_has_claimed(tmp_path: Path) -> None:
    with pytest.raises(OwnerError, match="was not claimed"):
        CheckpointFolder(str(tmp_path)).begin(1)


def test_a_folder_that_was_emptied_is_written_to_again(
    root: Path, local: CheckpointFolder
) -> None:
    save(local, 1)
    shutil.rmtree(root)

    assert save(local, 1) == "step-000000000001"


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "\0", '{"job_id": 1, "token": "a", "begun": []}',
             '{"job_id": "a", "token": "a", "begun": ["../x"]}']
)  # fmt: skip
def test_a_damaged_owner_is_named_and_a_restart_mends_it(
    root: Path, local: CheckpointFolder, text: str
) -> None:
    save(local, 1)
    (root / "owner.json").write_text(text)

    with pytest.raises(DamagedError, match=r"owner.json in .* is damaged"):
        local.begin(2)

    local.claim("job", "token")
    assert save(local, 2)


# Disks


def test_a_full_disk_leaves_the_checkpoint_before(
    root: Path, local: CheckpointFolder
) -> None:
    save(local, 1)
    name = local.begin(2)

    with full_disk(), pytest.raises(StorageError, match="free some space"):
        local.write_part(name, PART, tensors_of(0, 2), {})

    assert not (root / name / PART).exists()
    newest = local.newest_good().manifest
    assert newest is not None
    assert newest.version == 1
    assert save(local, 2) == f"{name}-2"


def test_a_store_that_does_not_answer_is_named_and_no_reason_to_go_back() -> None:
    files = FailingStore()
    storage = ObjectStorage(files, "/root", "failing://root", pause=lambda _: None)
    folder = CheckpointFolder("", storage)
    folder.claim("job", "token")
    save(folder, 1)
    save(folder, 2)

    files.failures += [TimeoutError("slow")] * 3
    with pytest.raises(StorageError, match="TimeoutError, slow"):
        folder.newest_good()

    newest = folder.newest_good().manifest
    assert newest is not None
    assert newest.version == 2


def test_a_local_folder_is_named_without_a_storage(tmp_path: Path) -> None:
    assert CheckpointFolder(str(tmp_path)).url == str(tmp_path)
    assert CheckpointFolder("", LocalStorage(tmp_path)).url == str(tmp_path)


# Returning


def test_what_is_newer_than_a_return_counts_no_more_until_it_is_pruned(
    folder: CheckpointFolder,
) -> None:
    names = [save(folder, version) for version in (1, 2, 3)]
    point = folder.manifest(names[0])

    assert folder.return_to(point) == tuple(names[1:])
    assert folder.names() == (names[0],)
    assert folder.undone() == tuple(names[1:])
    assert folder.newest_good().manifest == point
    folder.claim("job", "of another process")
    assert folder.names() == (names[0],)

    later = save(folder, 2)
    assert later == f"{names[1]}-2"
    assert folder.prune("job", 5) == tuple(names[1:])
    assert (folder.names(), folder.undone()) == ((names[0], later), ())
    assert save(folder, 3) == names[2]
    assert folder.names() == (names[0], later, names[2])


def test_a_return_may_be_taken_back_before_the_next_one(
    folder: CheckpointFolder,
) -> None:
    names = [save(folder, version) for version in (1, 2, 3)]
    folder.return_to(folder.manifest(names[0]))

    assert folder.return_to(folder.manifest(names[2])) == ()
    assert folder.names() == tuple(names)
    assert folder.prune("job", 5) == ()


def test_a_job_that_does_not_run_returns_too(
    root: Path, local: CheckpointFolder
) -> None:
    names = [save(local, version) for version in (1, 2)]
    other = CheckpointFolder(str(root))
    other.return_to(other.manifest(names[0]))

    assert local.names() == (names[0],)
    assert save(local, 3) == "step-000000000003", "whose claim still holds"
    (root / OWNER).unlink()
    other.return_to(other.manifest(names[0]))
    assert other.names() == (names[0],)
