"""Parts of checkpoints: copied while nothing is applied, written in the background."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from psserver.edge.cut_report import CutReport, PartReport
from psserver.edge.fence_report import WorkerHolding
from psserver.shard.core.core_image import CoreImage, WindowImage
from psserver.shard.host import checkpoint_parts
from psserver.shard.host.arithmetic import Arithmetic
from psserver.shard.host.checkpoint_parts import CheckpointParts
from psserver.shard.host.shard_model import ShardModel, shard_model
from psserver.shard.tensors.chunk_image import ChunkImage
from psserver.shard.tensors.shard_image import PartOfImage
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import part_name
from pswire.checkpoint.place import CheckpointPlace
from pswire.job_settings import JobSettings
from pswire.job_terms import JobTerms
from pswire.leased_data import DataRange
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from tests.doubles.core_values import key, sgd, trailer

NAME = "step-000000000004"
CHUNK_BYTES = 1 << 18
"""More than what is copied in the event loop."""

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
HOLDING = WorkerHolding(
    worker=key("a"),
    complete_sequence=2,
    trailer_sequence=2,
    touched_sequence=2,
    ranges=((2, DataRange("data", 0, 8, 16)),),
)


class Parts:
    """The parts of a shard of four chunks, and what was reported of them."""

    def __init__(self) -> None:
        self.arithmetic = Arithmetic(2)
        self.reports: asyncio.Queue[PartReport] = asyncio.Queue()
        self.cuts: asyncio.Queue[CutReport] = asyncio.Queue()
        name = part_name(0, 1)
        self.parts = CheckpointParts(name, self.arithmetic, self.reports.put_nowait)
        entry = SchemaEntry(
            name="weight", shape=(CHUNK_BYTES,), element_type=ElementType.FLOAT32
        )
        terms = JobTerms(schema=ModelSchema((entry,)), optimizers=(sgd(),))
        settings = JobSettings(job_id="job", shard_count=1, chunk_bytes=CHUNK_BYTES)
        self.model: ShardModel = shard_model(terms, settings=settings, shard_index=0)
        assert len(self.model.chunks) == 4

    def fill(self, value: float) -> None:
        for chunk in self.model.chunks:
            self.model.engine.vectors.view(chunk.index).fill_(value)

    def make(self, snapshot_id: int) -> None:
        self.parts.make(self.model, snapshot_id, CORE, done=self.cuts.put_nowait)

    async def copy(self, snapshot_id: int) -> CutReport:
        self.make(snapshot_id)
        return await self.cuts.get()

    async def write(self, snapshot_id: int, folder: Path) -> PartReport:
        self.parts.write(snapshot_id, CheckpointPlace(str(folder), NAME))
        return await self.reports.get()


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    made = Parts()
    yield made
    made.parts.close()
    made.arithmetic.close()


def blocked(arithmetic: Arithmetic) -> Callable[[], None]:
    """Has all threads wait, until what is returned is called."""
    go_on = threading.Event()

    def unexpected(error: BaseException) -> None:
        raise AssertionError(error)

    for _ in range(2):
        arithmetic.run(go_on.wait, 1 << 20, then=lambda _: None, failed=unexpected)
    return go_on.set


async def test_a_part_has_all_as_of_the_copy(parts: Parts, tmp_path: Path) -> None:
    parts.fill(1.0)
    assert await parts.copy(7) == CutReport(7, "", (HOLDING,))
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
        for chunk in parts.model.chunks:
            assert part.read(chunk).values.eq(1.0).all()


async def test_the_copy_is_not_reported_before_all_of_it_is_made(parts: Parts) -> None:
    """Until it is reported nothing is applied: what is copied later is another cut."""
    go_on = threading.Event()
    image_of = parts.model.engine.image_of

    def slow_at_the_last(chunk_index: int) -> ChunkImage:
        if chunk_index == parts.model.chunks[-1].index:
            go_on.wait()
        return image_of(chunk_index)

    with mock.patch.object(parts.model.engine, "image_of", slow_at_the_last):
        parts.make(7)
        # The other thread has ended all the others before it comes to this.
        await parts.arithmetic.result(lambda: None, CHUNK_BYTES)
        is_reported = not parts.cuts.empty()
        go_on.set()  # be it too soon: a thread that waits would outlive the test
        assert not is_reported
        assert not (await parts.cuts.get()).failure


async def test_training_goes_on_while_a_part_is_written(
    parts: Parts, tmp_path: Path
) -> None:
    """What is copied is no thread's that has arithmetic to do."""
    await parts.copy(7)
    go_on = blocked(parts.arithmetic)
    assert (await parts.write(7, tmp_path)).part is not None
    go_on()


async def test_values_that_are_not_finite_are_said(
    parts: Parts, tmp_path: Path
) -> None:
    parts.model.engine.vectors.view(2)[3] = float("inf")
    await parts.copy(7)
    assert not (await parts.write(7, tmp_path)).is_finite


async def test_a_part_that_is_asked_for_again_is_written_once(
    parts: Parts, tmp_path: Path
) -> None:
    await parts.copy(7)
    first = await parts.write(7, tmp_path)
    changed_ns = (tmp_path / NAME / part_name(0, 1)).stat().st_mtime_ns

    assert await parts.write(7, tmp_path) == first
    assert (tmp_path / NAME / part_name(0, 1)).stat().st_mtime_ns == changed_ns
    again = await parts.write(8, tmp_path)
    assert again == PartReport(8, failure="its copy is not kept any more")


async def test_a_copy_that_nobody_wants_is_freed(parts: Parts, tmp_path: Path) -> None:
    await parts.copy(7)
    assert not parts.parts.release(6)
    assert parts.parts.release(7)
    assert (await parts.write(7, tmp_path)).failure == "its copy is not kept any more"


async def test_a_copy_may_be_released_while_it_is_made(
    parts: Parts, tmp_path: Path
) -> None:
    go_on = blocked(parts.arithmetic)
    parts.make(7)
    parts.parts.release_up_to(7)
    go_on()
    assert not (await parts.cuts.get()).failure
    assert (await parts.write(7, tmp_path)).failure == "its copy is not kept any more"


async def test_the_copy_of_a_newer_cut_takes_the_place_of_one_not_written(
    parts: Parts, tmp_path: Path
) -> None:
    await parts.copy(7)
    parts.fill(3.0)
    await parts.copy(8)
    assert (await parts.write(7, tmp_path)).failure == "its copy is not kept any more"
    assert (await parts.write(8, tmp_path)).part is not None


async def test_nothing_is_copied_while_a_part_is_written(
    parts: Parts, tmp_path: Path
) -> None:
    await parts.copy(7)
    go_on = threading.Event()
    write_part = CheckpointFolder.write_part

    def slow(folder: CheckpointFolder, *arguments: object) -> object:
        go_on.wait()
        return write_part(folder, *arguments)  # type: ignore[arg-type]

    with mock.patch.object(CheckpointFolder, "write_part", slow):
        parts.parts.write(7, CheckpointPlace(str(tmp_path), NAME))
        assert (await parts.copy(8)).failure == "it still writes the checkpoint before"
        go_on.set()
        assert (await parts.reports.get()).part is not None
    assert not (await parts.copy(9)).failure


async def test_a_folder_that_takes_no_file_is_named(
    parts: Parts, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    await parts.copy(7)
    report = await parts.write(7, tmp_path / "file")
    assert report.part is None
    assert str(tmp_path / "file") in report.failure
    await parts.copy(8)
    assert (await parts.write(8, tmp_path)).part is not None


async def test_a_copy_for_which_there_is_no_memory_fails(
    parts: Parts, tmp_path: Path
) -> None:
    with mock.patch.object(
        parts.model.engine, "image_of", side_effect=MemoryError("none left")
    ):
        assert (await parts.copy(7)).failure == "MemoryError"
    assert (await parts.write(7, tmp_path)).failure == "its copy is not kept any more"


async def test_a_shard_without_chunks_has_an_empty_part(
    parts: Parts, tmp_path: Path
) -> None:
    parts.model = replace(parts.model, chunks=())
    assert (await parts.copy(7)).holdings == (HOLDING,)
    assert (await parts.write(7, tmp_path)).part is not None


async def test_a_shard_ends_while_a_part_is_written(
    parts: Parts, tmp_path: Path
) -> None:
    await parts.copy(7)
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
