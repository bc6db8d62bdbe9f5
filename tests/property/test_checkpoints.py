"""Whatever fails at whatever moment, a checkpoint is the old or the new one, whole."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.storage import LocalStorage
from tests.doubles.checkpoints import save, tensors_of
from tests.doubles.lossy_disk import LossyDisk, PowerCutError

checked = settings(derandomize=True, deadline=None, max_examples=120)

OPERATION_COUNT = 100
"""More than there are in three saves with what is pruned between them."""


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@dataclass
class Run:
    """A job's saves, until the power fails.

    Attributes:
        saved: The newest version of which it was said that it is saved.
        saving: The version that may be there, though nobody was told.
    """

    saved: int | None = None
    saving: int | None = None

    def go(self, folder: CheckpointFolder, keep: int) -> None:
        folder.claim("job", "token")
        for version in (100, 200, 300):
            self.saving = version
            save(folder, version)
            self.saved = version
            folder.prune("job", keep)


def folder_at(root: Path) -> CheckpointFolder:
    return CheckpointFolder("", LocalStorage(root, LossyDisk(root)))


def read_whole(folder: CheckpointFolder) -> int | None:
    """The version of the newest good checkpoint, every value of which is as it was."""
    manifest = folder.newest_good().manifest
    if manifest is None:
        return None
    for index, part in enumerate(manifest.parts):
        with folder.open_part(manifest.name, part) as reader:
            for key, tensor in tensors_of(index, manifest.version).items():
                assert torch.equal(reader.tensor(key), tensor)
    return manifest.version


@checked
@given(
    operation_count=st.integers(0, OPERATION_COUNT),
    keep=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_a_power_cut_leaves_the_old_or_the_new_one_whole(
    operation_count: int, keep: int, seed: int
) -> None:
    with scratch() as place:
        (place / "before").mkdir()
        disk = LossyDisk(place / "before", operation_count)
        run = Run()
        try:
            run.go(CheckpointFolder("", LocalStorage(place / "before", disk)), keep)
        except PowerCutError:
            pass
        else:
            assert disk.done_count < OPERATION_COUNT

        disk.after_power_cut(place / "after", Random(seed))

        folder = folder_at(place / "after")
        assert read_whole(folder) in {run.saved, run.saving}
        # And it goes on from there, whatever lies about.
        folder.claim("job", "another token")
        name = save(folder, 400)
        folder.prune("job", 1)
        assert read_whole(folder) == 400
        assert folder.names() == (name,)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: list[Callable[[Path], None]] = [flip, cut, Path.unlink]


@dataclass
class Saved:
    """A checkpoint in a folder of several jobs'."""

    version: int
    job_id: str = field(compare=False)
    is_finite: bool = field(compare=False)
    damage: int | None = field(compare=False)
    is_of_manifest: bool = field(compare=False)


saved_checkpoints = st.lists(
    st.builds(
        Saved,
        version=st.integers(1, 9),
        job_id=st.sampled_from(["job", "job", "job", "other"]),
        is_finite=st.sampled_from([True, True, False]),
        damage=st.sampled_from([None, None, 0, 1, 2]),
        is_of_manifest=st.booleans(),
    ),
    max_size=7,
)


def fill(root: Path, saves: list[Saved]) -> None:
    for job_id in ("job", "other"):
        (root.parent / job_id).mkdir()
        folder = folder_at(root.parent / job_id)
        folder.claim(job_id, "token")
        for each in saves:
            if each.job_id != job_id:
                continue
            name = save(folder, each.version, job_id=job_id, is_finite=each.is_finite)
            if each.damage is not None:
                path = root.parent / job_id / name
                file = (
                    "manifest.json"
                    if each.is_of_manifest
                    else min(found.name for found in path.glob("part-*"))
                )
                DAMAGES[each.damage](path / file)
    shutil.copytree(root.parent / "job", root)
    for path in (root.parent / "other").glob("step-*"):
        if not (root / path.name).exists():
            shutil.copytree(path, root / path.name)


def contents(root: Path) -> dict[str, dict[str, bytes]]:
    return {
        path.name: {each.name: each.read_bytes() for each in path.iterdir()}
        for path in root.glob("step-*")
    }


def flipped_count(saves: list[Saved]) -> int:
    """Checkpoints that are damaged and have their sizes, which are kept as others."""
    return sum(
        each.job_id == "job" and each.damage == 0 and not each.is_of_manifest
        for each in saves
    )


@settings(checked, max_examples=60)
@given(saves=saved_checkpoints, keep=st.integers(1, 3))
def test_what_is_pruned_is_of_this_job_and_older_than_a_good_one(
    saves: list[Saved], keep: int
) -> None:
    with scratch() as place:
        root = place / "root"
        fill(root, saves)
        before = contents(root)
        folder = folder_at(root)
        jobs = {name: folder._job_of(name) for name in folder.names()}
        good = [
            name
            for name in folder.names()
            if jobs[name] == "job"
            and not folder.verify(name)
            and folder.manifest(name).is_finite
        ]

        diverged = [
            name
            for name in jobs
            if jobs[name] == "job" and not folder.manifest(name).is_finite
        ]

        pruned = folder.prune("job", keep)

        after = contents(root)
        assert after == {n: before[n] for n in before if n not in pruned}
        assert all(jobs[name] == "job" for name in pruned if jobs[name] is not None)
        if not good:
            assert pruned == ()
        else:
            assert good[-1] in after
            assert all(name < good[-1] or name in diverged for name in pruned)
            plausible = [name for name in good if name in after]
            assert len(plausible) >= min(keep, len(good) - flipped_count(saves))
        assert folder.prune("job", keep) == ()
