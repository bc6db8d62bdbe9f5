"""A shard goes on from a checkpoint of any number of shards, or says why not."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from psserver.edge.fence_report import FenceReport
from psserver.shard.core.core_image import CoreImage
from psserver.shard.core.effects import CommitSeed, DiscardSeed
from psserver.shard.host.checkpoint_loading import CheckpointLoading
from psserver.shard.host.shard_model import ShardModel, shard_model
from psserver.shard.tensors.saved_images import SavedImages
from psserver.shard.tensors.shard_image import PartOfImage
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import part_name
from pswire.checkpoint.place import CheckpointPlace
from pswire.job_settings import JobSettings
from pswire.membership import FenceKind
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.core_values import record, trailer
from tests.doubles.resident_memory import PeakMemory, resident_of
from tests.doubles.saved_shards import NAME, save
from tests.unit.psserver.shard.tensors.shards import Push, Shards

RATES = ((0.125, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.0, 0.0),)
CORE = CoreImage(
    version=4,
    applied_clock=2,
    frontier=2,
    windows=(),
    used={
        "optimizer": replace(
            trailer(weight=0.0), hyperparameters=RATES, scheduler_steps=(7,)
        )
    },
)

small_chunks = cut_into(64, 256)


def trained(shard_count: int = 2) -> Shards:
    generator = torch.Generator().manual_seed(3)
    parameters = [
        torch.nn.Parameter(torch.randn(90, generator=generator).bfloat16()),
        torch.nn.Parameter(torch.randn(130, generator=generator)),
    ]
    optimizers = {"optimizer": torch.optim.Adam(parameters)}
    shards = Shards(parameters, optimizers, shard_count=shard_count)
    for _ in range(2):
        drawn = [torch.randn(each.shape).to(each.dtype) for each in parameters]
        shards.step([Push("w0", 1, drawn)])
    return shards


class Loading:
    """One shard of a job that begins, and what its core has asked for."""

    def __init__(self, shards: Shards, shard_index: int = 0, count: int = 1) -> None:
        settings = JobSettings(job_id="job", shard_count=count)
        self.model: ShardModel = shard_model(
            shards.terms, settings=settings, shard_index=shard_index
        )
        self.reports: asyncio.Queue[FenceReport] = asyncio.Queue()
        self.loading = CheckpointLoading(self.pump)

    def pump(self) -> None:
        for effect in self.model.core.take_effects():
            match effect:
                case DiscardSeed():
                    self.model.engine.begin_seed()
                case CommitSeed():
                    self.model.engine.commit_seed()
                case FenceReport():
                    self.reports.put_nowait(effect)

    def prepare(self, number: int, place: CheckpointPlace) -> None:
        self.model.core.prepare_fence(number, FenceKind.START, loads=True)
        self.pump()
        self.loading.begin(self.model, number, place)

    async def load(self, place: CheckpointPlace) -> FenceReport:
        self.prepare(1, place)
        return await self.reports.get()

    def start(self) -> None:
        first = record({"a": 2}, departed_step_count=4, mode_clock=2)
        self.model.core.install_record(first)
        self.pump()


@pytest.fixture
async def loaded(tmp_path: Path) -> AsyncIterator[Loading]:
    made = Loading(trained())
    yield made
    made.loading.close()


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_shards_go_on_with_all_that_a_checkpoint_has(
    count: int, tmp_path: Path
) -> None:
    shards = trained()
    place = save(shards, tmp_path, CORE)
    onto = [Loading(shards, index, count) for index in range(count)]

    for each in onto:
        assert (await each.load(place)).failure == ""
        each.start()

    again = save(_shards_of(shards, onto), tmp_path / "again", CORE)
    expected, found = _numbers(place), _numbers(again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for each in onto:
        core = each.model.core
        assert core.state.used == CORE.used
        assert (core.clocks.version, core.clocks.frontier) == (4, 2)
        assert core.clocks.applied_clock == 2


def _shards_of(shards: Shards, onto: list[Loading]) -> Shards:
    made = Shards.__new__(Shards)
    made.terms, made.schema = shards.terms, shards.schema
    made.placement = onto[0].model.placement
    made.engines = [each.model.engine for each in onto]
    return made


def _numbers(place: CheckpointPlace) -> dict[str, torch.Tensor]:
    """Values, masters and state of a checkpoint, each as one long vector."""
    folder = CheckpointFolder(place.url)
    manifest = folder.manifest(place.name)
    found: dict[str, list[torch.Tensor]] = {}
    for chunk in manifest.placement().chunks:
        part = manifest.parts[chunk.shard_index]
        with folder.open_part(place.name, part) as opened:
            image = PartOfImage(opened).read(chunk)
        found.setdefault(f"value {image.values.dtype}", []).append(image.values)
        if image.master is not None:
            found.setdefault("master", []).append(image.master)
        for key_, value in image.states["optimizer"].state.items():
            name = f"{key_.name} {chunk.element_type.name}"
            if value.ndim:
                found.setdefault(name, []).append(value)
            else:
                found[name] = [value[None]]
    return {name: torch.cat(parts) for name, parts in found.items()}


async def test_nothing_counts_before_the_record(
    loaded: Loading, tmp_path: Path
) -> None:
    await loaded.load(save(trained(), tmp_path, CORE))
    engine, core = loaded.model.engine, loaded.model.core
    assert not engine.vectors.view(0).any()
    assert core.state.used == {}


async def test_a_shard_without_chunks_has_the_settings_too(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizers = {"optimizer": torch.optim.Adam([parameter])}
    shards = Shards([parameter], optimizers, shard_count=1)
    without = Loading(shards, 1, 2)
    assert without.model.chunks == ()

    assert (await without.load(save(shards, tmp_path, CORE))).failure == ""
    without.start()

    assert without.model.core.state.used == CORE.used


# What can't be loaded


async def test_a_damaged_part_is_named_and_another_attempt_may_follow(
    loaded: Loading, tmp_path: Path
) -> None:
    place = save(trained(), tmp_path, CORE)
    path = tmp_path / NAME / part_name(1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])

    report = await loaded.load(place)

    assert f"{NAME}/{path.name}" in report.failure
    assert "are not those that were written" in report.failure
    loaded.model.core.abort_fence(1)
    path.write_bytes(whole)
    loaded.prepare(2, place)
    assert (await loaded.reports.get()).failure == ""


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"core": "x"}, "no state of a shard's protocol"),
        ({"declared": "[]"}, "its metadata are not a shard's"),
        (
            {"core": replace(CORE, used={"other": CORE.used["optimizer"]}).to_json()},
            "has no optimizer 'other'",
        ),
        (
            {
                "declared": json.dumps(
                    {"optimizer": dict.fromkeys(map(str, range(9)), "x")}
                )
            },
            "was never declared as 'x'",
        ),
    ],
)
async def test_metadata_that_no_shard_writes_are_refused(
    loaded: Loading, tmp_path: Path, metadata: dict[str, str], problem: str
) -> None:
    with mock.patch(
        "psserver.shard.tensors.shard_image.ShardImage.metadata",
        lambda image: {
            "core": image.core.to_json(),
            "declared": "{}",
            **metadata,
        },
    ):
        place = save(trained(), tmp_path, CORE)
    assert problem in (await loaded.load(place)).failure


async def test_a_missing_checkpoint_is_named(loaded: Loading, tmp_path: Path) -> None:
    report = await loaded.load(CheckpointPlace(str(tmp_path), NAME))
    assert NAME in report.failure
    assert str(tmp_path) in report.failure


async def test_a_checkpoint_of_another_model_is_refused(
    loaded: Loading, tmp_path: Path
) -> None:
    parameter = torch.nn.Parameter(torch.randn(90))
    other = Shards(
        [parameter], {"optimizer": torch.optim.Adam([parameter])}, shard_count=2
    )
    report = await loaded.load(save(other, tmp_path, CORE))
    assert "is of another model than the job's" in report.failure


async def test_a_bug_in_reading_is_reported_and_ends_nothing(
    loaded: Loading, tmp_path: Path
) -> None:
    place = save(trained(), tmp_path, CORE)
    with mock.patch.object(SavedImages, "image", side_effect=MemoryError("none")):
        assert (await loaded.load(place)).failure == "MemoryError"


# Attempts that end


async def test_what_is_read_for_a_fence_that_is_over_is_not_staged(
    loaded: Loading, tmp_path: Path
) -> None:
    place = save(trained(), tmp_path, CORE)
    read, go_on = threading.Event(), threading.Event()
    image = SavedImages.image

    def slow(saved: SavedImages, chunk: object) -> object:
        read.set()
        go_on.wait()
        return image(saved, chunk)  # type: ignore[arg-type]

    with mock.patch.object(SavedImages, "image", slow):
        loaded.prepare(1, place)
        await asyncio.get_running_loop().run_in_executor(None, read.wait)
        loaded.model.core.abort_fence(1)
        loaded.pump()
        with mock.patch.object(loaded.model.engine, "write_seed_image") as staged:
            go_on.set()
            await loaded.loading._loading  # type: ignore[misc]
        staged.assert_not_called()
    assert loaded.reports.empty()
    loaded.prepare(2, place)
    assert (await loaded.reports.get()).failure == ""


async def test_a_fence_that_is_prepared_again_is_loaded_once(
    loaded: Loading, tmp_path: Path
) -> None:
    place = save(trained(), tmp_path, CORE)
    loaded.prepare(1, place)
    task = loaded.loading._loading
    loaded.prepare(1, place)
    assert loaded.loading._loading is task
    assert (await loaded.reports.get()).failure == ""
    loaded.prepare(1, place)
    assert loaded.loading._loading is task


# Memory

MIB = 1 << 20
_CHILD = f"from {__name__} import load_alone; load_alone()"


def large_shards(shard_count: int) -> Shards:
    """Adam of 12 Mi parameters of 16 bits: 14 bytes of each."""
    parameter = torch.nn.Parameter(torch.ones(12 * MIB, dtype=torch.bfloat16))
    optimizers = {"optimizer": torch.optim.Adam([parameter])}
    return Shards([parameter], optimizers, shard_count=shard_count)


def load_alone() -> None:
    """In a process of its own: loads, and prints what that has taken."""

    async def load(each: Loading) -> None:
        assert (await each.load(CheckpointPlace(sys.argv[1], NAME))).failure == ""
        each.start()

    each = Loading(large_shards(1))
    gc.collect()
    before = resident_of(os.getpid()).own
    with PeakMemory({"self": os.getpid()}, 0) as peak:
        asyncio.run(load(each))
    engine = each.model.engine
    own = engine.vectors.byte_count + engine.state_byte_count
    print(own, peak.by_name["self"].own - before)


def test_loading_takes_little_memory_beside_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 256 MiB: of the largest chunks the state of a few is there."""
    monkeypatch.undo()  # the size of chunks
    shards = large_shards(3)
    shards.step([Push("w0", 1, [torch.ones(12 * MIB, dtype=torch.bfloat16)])])
    save(shards, tmp_path, CORE)

    # What this process has freed would be used first.
    printed = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[5],
    ).stdout

    own, peak = map(int, printed.split())
    assert own >= 12 * MIB * (2 + 4 + 8)
    assert own <= peak <= own + 128 * MIB
