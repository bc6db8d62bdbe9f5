"""A manifest that somebody has changed and sealed again is refused by its field."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.host.restored_job import newest_saved, restored_core
from psserver.coordinator.storage.job_store import JobStore
from psserver.coordinator.storage.saved_job import saved_job_of
from psserver.edge.coordinator_settings import CoordinatorSettings
from pswire.checkpoint.errors import CheckpointError, DamagedError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import MANIFEST, Manifest, _sealed
from tests.doubles.checkpoints import save
from tests.unit.psserver.coordinator.storage.test_saved_job import made, pending

Place = tuple[str | int, ...]

BODY: Final[dict[str, Any]] = json.loads(made(pending()).to_json())["manifest"]
VALUES: Final[tuple[object, ...]] = (
    *(None, True, -1, 1 << 70, -(1 << 70), 1.5, float("nan"), "", "x", "\x00"),
    *([], {}, [1], [[]], ["w0", 1], [["w0", 1], []], {"x": 1}),
)


def paths(value: Any, path: Place = ()) -> Iterator[Place]:  # noqa: ANN401, of JSON
    if path:
        yield path
    inner: Any = value if isinstance(value, dict) else {}
    if isinstance(value, list):
        inner = dict(enumerate(value))
    for name, each in inner.items():
        yield from paths(each, (*path, name))


def changed(path: Place, value: Any) -> dict[str, Any]:  # noqa: ANN401, of JSON
    body = copy.deepcopy(BODY)
    inner: Any = body
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return body


def kind(value: object) -> type:
    return float if type(value) is int else type(value)


def field(path: Place) -> str:
    names = [f"[{each}]" if isinstance(each, int) else f".{each}" for each in path]
    return "".join(names)


def test_a_value_of_another_kind_is_refused_by_its_field() -> None:
    for path in paths(BODY):
        before: Any = BODY
        for name in path:
            before = before[name]
        refused = {}
        for number, value in enumerate(VALUES):
            try:
                sealed = _sealed(1, changed(path, value))
                saved_job_of(Manifest.from_json(sealed), "/checkpoints")
            except DamagedError as error:
                refused[number] = str(error)
        assert refused, f"all were taken of {path}"
        for number, said in refused.items():
            is_other = kind(VALUES[number]) is not kind(before)
            if is_other and path != ("state",):  # which may have one of two forms
                place = re.match(r"its field manifest(\S+) is .* and not ", said)
                assert place is not None, said
                assert place[1].startswith(field(path))


def test_a_field_that_is_missing_or_of_no_release_is_refused() -> None:
    for path in paths(BODY):
        inner: Any = (body := copy.deepcopy(BODY))
        for name in path[:-1]:
            inner = inner[name]
        if isinstance(inner, list) or path[:-1] == ("job", "incarnations"):
            continue  # of any number
        inner["unknown"] = inner.pop(path[-1])
        with pytest.raises(DamagedError, match="and not an object of "):
            Manifest.from_json(_sealed(1, body))


def test_a_file_of_before_a_field_was_added_is_good() -> None:
    body = copy.deepcopy(BODY)
    del body["terms"]["privacy"], body["terms"]["strategy"]
    del body["job"]["participation_count_before"]
    for _, _, epoch in body["job"]["epochs"]:
        del epoch["repetition_max"], epoch["taken_back"]
    assert body["job"]["epochs"]
    read, now = (
        saved_job_of(Manifest.from_json(_sealed(1, each)), "/checkpoints")
        for each in (body, BODY)
    )
    assert (read.terms, read.point) == (now.terms, now.point)
    assert [e.repetition_max for e in read.epochs] == [0] * len(now.epochs)


def started(folder: CheckpointFolder, state_dir: Path) -> CoordinatorCore:
    """A coordinator's core, and the same again from its state folder."""
    settings = CoordinatorSettings(job_id="job", shard_count=2)
    for _ in range(2):
        with JobStore(state_dir) as store:
            core = restored_core(settings, store, 0, newest_saved(folder, folder.url))
            core.tick(1_000_000)
    return core


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            ("job", "record", "members", 0, "rank"),
            "first",
            "job.record.members[0].rank is 'first', and not a whole number",
        ),
        (("terms", "optimizers", 0, "class_name"), "Unknown", ""),
    ],
)
def test_the_daemon_goes_on_from_the_checkpoint_before(
    tmp_path: Path, path: Place, value: object, said: str
) -> None:
    folder = CheckpointFolder(str(tmp_path / "checkpoints"))
    folder.claim("job", "token")
    names = [save(folder, version) for version in (10, 20)]
    file = tmp_path / "checkpoints" / names[1] / MANIFEST
    inner = body = json.loads(file.read_text())["manifest"]
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    file.write_text(_sealed(1, body))

    problems = " ".join(folder.verify(names[1]))
    assert said in problems
    assert bool(said) == (f"{names[1]}/{MANIFEST}" in problems)
    point = started(folder, tmp_path / "state").progress.start_point
    assert point is not None
    assert point.place.name == names[0]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("held", 0, 1, 0, 3), 17, "not within the 16 positions"),
        (("held", 0, 1, 0, 2), 16, "not within the 16 positions"),
        (("held", 0, 1, 0, 0), "other", "not within the 16 positions"),
        (("returned", 0, 1), 4, "not within the 16 positions"),
        (("cursor",), 65, "up to position 65, of 64"),
        (("shape", "batch_size"), 0, "and not a whole number from 1"),
    ],
)
def test_data_that_no_epoch_has_is_refused(
    path: Place, value: object, said: str
) -> None:
    body = changed(("job", "epochs", 0, 2, *path), value)
    with pytest.raises(DamagedError, match=said):
        Manifest.from_json(_sealed(1, body))


def test_an_epoch_that_is_there_twice_is_refused() -> None:
    body = changed(("job", "epochs"), BODY["job"]["epochs"] * 2)
    with pytest.raises(DamagedError, match="is there before"):
        Manifest.from_json(_sealed(1, body))


@pytest.mark.repeat
def test_whatever_is_taken_starts_a_coordinator(tmp_path: Path) -> None:
    """Twice, and a tick further, or is refused as a checkpoint."""
    number, taken = 0, 0
    for path in paths(BODY):
        for value in VALUES:
            number += 1
            try:
                manifest = Manifest.from_json(_sealed(1, changed(path, value)))
                saved = saved_job_of(manifest, "/checkpoints")
            except CheckpointError:
                continue
            taken += 1
            settings = CoordinatorSettings(job_id="job", shard_count=2)
            for _ in range(2):
                with JobStore(tmp_path / str(number)) as store:
                    restored_core(settings, store, 0, saved).tick(1_000_000)
    assert 0 < taken < number
