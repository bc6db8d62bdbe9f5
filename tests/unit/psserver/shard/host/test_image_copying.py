"""Images of cuts are copied in a thread, one at a time, and reported when whole."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from psserver.shard.host.image_copying import Image, ImageCopying
from psserver.shard.tensors.apply_engine import ApplyEngine
from pswire.job_terms import JobTerms
from pswire.placement import place
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from tests.doubles.core_values import sgd

TERMS = JobTerms(
    schema=ModelSchema(
        tuple(
            SchemaEntry(name=name, shape=(8,), element_type=ElementType.FLOAT32)
            for name in "ab"
        )
    ),
    optimizers=(sgd(),),
)
PLACEMENT = place(TERMS.schema, 1, 32)


class SlowEngine(ApplyEngine):
    """Copies no image before it is let."""

    def __init__(self) -> None:
        super().__init__(TERMS, PLACEMENT, 0)
        self.go_on = threading.Event()
        self.ended: list[Image] = []

    def copy_image(self, image: Image) -> None:
        self.go_on.wait()
        super().copy_image(image)

    def end_image(self, image: Image) -> None:
        super().end_image(image)
        self.ended.append(image)


class Copying:
    """What copies, and the images that have come of it."""

    def __init__(self) -> None:
        self.engine = SlowEngine()
        self.copying = ImageCopying()
        self.images: asyncio.Queue[Image] = asyncio.Queue()

    def begin(self, snapshot_id: int) -> None:
        self.copying.begin(
            self.engine, snapshot_id, values_only=True, then=self.images.put_nowait
        )


@pytest.fixture
async def copying() -> AsyncIterator[Copying]:
    made = Copying()
    yield made
    made.engine.go_on.set()
    made.copying.close()


async def test_an_image_is_reported_when_all_of_it_is_copied(copying: Copying) -> None:
    copying.begin(7)
    await asyncio.sleep(0)
    assert copying.images.empty()
    copying.engine.go_on.set()
    image = await copying.images.get()

    assert image.chunks.keys() == {each.index for each in PLACEMENT.chunks}
    assert copying.engine.ended == [image]
    assert not copying.copying.release(7), "it is nobody's to abandon any more"


async def test_an_image_may_be_released_while_it_is_copied(copying: Copying) -> None:
    copying.begin(7)
    assert not copying.copying.release(6)
    copying.copying.release_up_to(6)
    assert copying.copying.release(7)
    copying.engine.go_on.set()
    image = await copying.images.get()

    assert image.failure == "nobody wants it any more"
    assert image.chunks == {}
    assert copying.engine.ended == [image]


async def test_a_newer_cut_has_the_older_one_fail(copying: Copying) -> None:
    copying.begin(7)
    copying.begin(8)
    copying.copying.release_up_to(7)
    copying.engine.vectors.view(0).fill_(1.0)
    copying.engine.go_on.set()
    found = [await copying.images.get() for _ in range(2)]

    assert sorted(bool(image.failure) for image in found) == [False, True]
    assert sorted(len(image.chunks) for image in found) == [0, len(PLACEMENT.chunks)]


async def test_a_shard_ends_while_an_image_is_copied(copying: Copying) -> None:
    copying.begin(7)
    await asyncio.sleep(0)
    copying.copying.close()
    copying.engine.go_on.set()
    await asyncio.sleep(0)
    assert copying.images.empty()
