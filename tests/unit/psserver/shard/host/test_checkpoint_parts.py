"""Parts of checkpoints: images that are kept, and written in the background."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import pytest

from psserver.edge.cut_report import PartReport
from psserver.shard.core.core_image import CoreImage, WindowImage
from psserver.shard.host import checkpoint_parts
from psserver.shard.host.checkpoint_parts import CheckpointParts
from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.shard_image import PartOfImage, ShardImage
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import part_name
from pswire.checkpoint.place import CheckpointPlace
from pswire.job_terms import JobTerms
from pswire.leased_data import DataRange
from pswire.placement import place
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from tests.doubles.core_values import key, sgd, trailer

NAME = "step-000000000004"
ELEMENT_COUNT = 4 << 10

CORE = CoreImage(
    version=4,
    applied_clock=2,
    frontier=2,
    windows=(
        WindowImage(
            worker=key("a"),
            done_sequence=2,
            ranges=((2, DataRange("data", 0, 8, 16)),),
        ),
    ),
    used={"optimizer": trailer(weight=0.0)},
)


class Parts:
    """The parts of a shard of four chunks, and what was reported of them."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[PartReport] = asyncio.Queue()
        self.parts = CheckpointParts(part_name(0, 1), self.reports.put_nowait)
        entry = SchemaEntry(
            name="weight", shape=(ELEMENT_COUNT,), element_type=ElementType.FLOAT32
        )
        terms = JobTerms(schema=ModelSchema((entry,)), optimizers=(sgd(),))
        placement = place(terms.schema, 1, ELEMENT_COUNT)
        self.chunks = placement.chunks
        self.engine = ApplyEngine(terms, placement, 0)
        assert len(self.chunks) == 4

    def fill(self, value: float) -> None:
        for chunk in self.chunks:
            self.engine.vectors.view(chunk.index).fill_(value)

    def copy(self, snapshot_id: int) -> None:
        """As a shard at a cut that has nothing to train beside it."""
        spare = self.parts.make_room()
        assert spare is not None
        image = self.engine.begin_image(into=spare)
        self.engine.copy_image(image)
        self.parts.keep(snapshot_id, ShardImage(CORE, image.chunks))

    async def write(self, snapshot_id: int, folder: Path) -> PartReport:
        self.parts.write(snapshot_id, CheckpointPlace(str(folder), NAME))
        return await self.reports.get()


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    made = Parts()
    yield made
    made.parts.close()


async def test_a_part_has_all_as_of_the_copy(parts: Parts, tmp_path: Path) -> None:
    parts.fill(1.0)
    parts.copy(7)
    parts.fill(2.0)

    report = await parts.write(7, tmp_path)

    assert report.part is not None
    assert report == PartReport(7, report.part, is_finite=True)
    assert report.part.name == "part-00000-of-00001.safetensors"
    with CheckpointFolder(str(tmp_path)).open_part(NAME, report.part) as opened:
        assert "residual" not in opened.metadata["core"]
        assert "compression" in opened.metadata["dropped"]
        part = PartOfImage(opened)
        assert part.core == CORE
        for chunk in parts.chunks:
            assert part.read(chunk).values.eq(1.0).all()


async def test_values_that_are_not_finite_are_said(
    parts: Parts, tmp_path: Path
) -> None:
    parts.engine.vectors.view(2)[3] = float("inf")
    parts.copy(7)
    assert not (await parts.write(7, tmp_path)).is_finite


async def test_a_part_that_is_asked_for_again_is_written_once(
    parts: Parts, tmp_path: Path
) -> None:
    parts.copy(7)
    first = await parts.write(7, tmp_path)
    changed_ns = (tmp_path / NAME / part_name(0, 1)).stat().st_mtime_ns

    assert await parts.write(7, tmp_path) == first
    assert (tmp_path / NAME / part_name(0, 1)).stat().st_mtime_ns == changed_ns
    again = await parts.write(8, tmp_path)
    assert again == PartReport(8, failure="its copy is not kept any more")


async def test_a_copy_that_nobody_wants_is_freed(parts: Parts, tmp_path: Path) -> None:
    parts.copy(7)
    assert not parts.parts.release(6)
    parts.parts.release_up_to(6)
    assert parts.parts.release(7)
    parts.copy(8)
    parts.parts.release_up_to(8)
    assert not parts.parts.release(8)
    assert (await parts.write(7, tmp_path)).failure == "its copy is not kept any more"


async def test_the_copy_of_a_newer_cut_takes_the_place_of_one_not_written(
    parts: Parts, tmp_path: Path
) -> None:
    parts.copy(7)
    parts.fill(3.0)
    parts.copy(8)
    assert (await parts.write(7, tmp_path)).failure == "its copy is not kept any more"
    assert (await parts.write(8, tmp_path)).part is not None


async def test_the_next_image_takes_the_memory_of_one_that_is_written(
    parts: Parts, tmp_path: Path
) -> None:
    """New memory costs more than the copy: the system zeroes it page by page."""
    parts.copy(7)
    assert parts.parts._kept is not None
    places = {
        index: chunk.values.data_ptr()
        for index, chunk in parts.parts._kept[1].chunks.items()
    }
    await parts.write(7, tmp_path)
    parts.fill(5.0)
    parts.copy(8)
    for index, chunk in parts.parts._kept[1].chunks.items():
        assert chunk.values.data_ptr() == places[index]
        assert chunk.values.eq(5.0).all()


async def test_little_memory_is_kept_for_the_next_image(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_parts, "KEPT_BYTES", 4 * ELEMENT_COUNT - 1)
    parts.copy(7)
    await parts.write(7, tmp_path)
    assert parts.parts.make_room() == {}


async def test_there_is_no_room_for_an_image_while_a_part_is_written(
    parts: Parts, tmp_path: Path
) -> None:
    parts.copy(7)
    go_on = threading.Event()
    write_part = CheckpointFolder.write_part

    def slow(folder: CheckpointFolder, *arguments: object) -> object:
        go_on.wait()
        return write_part(folder, *arguments)  # type: ignore[arg-type]

    with mock.patch.object(CheckpointFolder, "write_part", slow):
        parts.parts.write(7, CheckpointPlace(str(tmp_path), NAME))
        assert parts.parts.make_room() is None
        go_on.set()
        assert (await parts.reports.get()).part is not None
    assert parts.parts.make_room() is not None


async def test_a_folder_that_takes_no_file_is_named(
    parts: Parts, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    parts.copy(7)
    report = await parts.write(7, tmp_path / "file")
    assert report.part is None
    assert str(tmp_path / "file") in report.failure
    parts.copy(8)
    assert (await parts.write(8, tmp_path)).part is not None


async def test_a_shard_without_chunks_has_an_empty_part(
    parts: Parts, tmp_path: Path
) -> None:
    parts.parts.keep(7, ShardImage(CORE, {}))
    assert (await parts.write(7, tmp_path)).part is not None


async def test_a_shard_ends_while_a_part_is_written(
    parts: Parts, tmp_path: Path
) -> None:
    parts.copy(7)
    go_on = threading.Event()
    with mock.patch.object(
        checkpoint_parts, "written_part", side_effect=lambda *_: go_on.wait()
    ):
        parts.parts.write(7, CheckpointPlace(str(tmp_path), NAME))
        await asyncio.sleep(0)
        parts.parts.close()
        await asyncio.sleep(0)
        go_on.set()
    assert parts.reports.empty()
