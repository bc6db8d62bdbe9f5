"""The image of a cut, copied in any order beside any changes, is the cut's.

Drawn changes of a shard's chunks and drawn turns of the thread that copies, beside a
dumb copy of everything that is made at the cut.
"""

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest
import torch

from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.chunk_image import ChunkImage, PendingImage
from psserver.shard.tensors.contribution import Contribution
from pswire.placement import Chunk
from pswire.torch_types import buffer_of
from tests.doubles.chunk_sizes import cut_into
from tests.unit.psserver.shard.tensors.shards import Push, Shards
from tests.unit.psserver.shard.tensors.test_recut_images import (
    TRAINED,
    draw,
    mixed_parameters,
)

SCHEDULE_COUNT: Final = 20
CHANGE_COUNT: Final = 40
OPTIMIZERS: Final = {"a/b": TRAINED[:5], "other": TRAINED[5:]}
VALUES: Final = 3
"""Of this parameter workers publish values."""

small_chunks = cut_into(64, 256)


def one_shard(generator: torch.Generator) -> Shards:
    """With masters, two optimizers and what nothing trains."""
    parameters = mixed_parameters(generator)
    own = {
        name: [parameters[index] for index in indexes]
        for name, indexes in OPTIMIZERS.items()
    }
    optimizers: dict[str, torch.optim.Optimizer] = {
        "a/b": torch.optim.Adam(own["a/b"], amsgrad=True),
        "other": torch.optim.SGD(own["other"], lr=0.1, momentum=0.9),
    }
    return Shards(parameters, optimizers, shard_count=1)


class Trained:
    """A shard with masters, two optimizers and what nothing trains."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.shards = one_shard(self.generator)
        self.engine = self.shards.engines[0]
        self.chunks = self.shards.placement.chunks
        for _ in range(2):
            for name in OPTIMIZERS:
                self.shards.step([self.push(name)], name)

    def push(self, name: str) -> Push:
        return draw(self.generator, OPTIMIZERS[name])

    def change(self) -> None:
        """A push, values in place of others, or another state."""
        kind = self.rng.choice(["push", "push", "push", "values", "state"])
        if kind == "state" and self.rng.random() < 0.2:
            name = self.rng.choice(list(OPTIMIZERS))
            states = {
                chunk.index: self.engine.export_state(name, chunk.index)
                for chunk in self.rng.sample(self.chunks, 3)
            }
            self.engine.load_state(name, states)
        elif kind == "values":
            self.publish(self.rng.choice(self.valued))
        else:
            name = self.rng.choice(list(OPTIMIZERS))
            chunk = self.rng.choice(self.chunks)
            self.shards.apply(chunk, [self.push(name)], name)

    @property
    def valued(self) -> list[Chunk]:
        return [
            chunk
            for chunk in self.chunks
            if VALUES in {piece.entry_index for piece in chunk.slices}
        ]

    def publish(self, chunk: Chunk) -> None:
        presence = tuple(piece.entry_index == VALUES for piece in chunk.slices)
        count = sum(
            piece.element_count for piece in chunk.slices if piece.entry_index == VALUES
        )
        values = torch.randn(count, generator=self.generator)
        self.engine.apply(
            chunk.index,
            optimizer="a/b",
            contributions=[
                Contribution(
                    worker_id="w0",
                    weight=1.0,
                    presence=presence,
                    data=buffer_of(values),
                    value_entries=frozenset([VALUES]),
                )
            ],
            total_weight=1.0,
            hyperparameters=self.shards.hyperparameters("a/b"),
        )

    def bits(self, *, values_only: bool = False) -> dict[str, object]:
        """What the shard holds now."""
        chunks = {each.index: self.engine.image_of(each.index) for each in self.chunks}
        if values_only:
            chunks = {index: ChunkImage(each.values) for index, each in chunks.items()}
        return bits(chunks)


def bits(chunks: Mapping[int, ChunkImage]) -> dict[str, object]:
    """All that there is of them."""
    found: dict[str, object] = {}
    for index, chunk in chunks.items():
        found |= {name: bytes(buffer_of(each)) for name, each in chunk.named(index)}
        found |= {
            f"declared {name} {index}": held.spec_digest
            for name, held in chunk.states.items()
        }
    return found


def copied_here(engine: ApplyEngine, image: PendingImage[ChunkImage]) -> None:
    engine.copy_image(image)
    engine.end_image(image)


@pytest.mark.parametrize("seed", range(SCHEDULE_COUNT))
def test_an_image_is_that_of_its_cut(seed: int) -> None:
    shard = Trained(seed)
    rng, engine = shard.rng, shard.engine
    spare: Mapping[int, ChunkImage] = {}
    for _ in range(2):  # the second one takes the memory of the first
        expected = shard.bits()
        image = engine.begin_image(into=spare)
        turns = iter(shard.chunks)
        for _ in range(rng.randrange(CHANGE_COUNT)):
            if rng.random() < 0.5:
                shard.change()
            elif (chunk := next(turns, None)) is not None:
                image.take(chunk.index)
        copied_here(engine, image)
        for _ in range(5):
            shard.change()
        assert not image.failure
        assert bits(image.chunks) == expected
        assert shard.bits() != expected
        spare = image.chunks


def test_an_image_of_the_values_alone_has_no_more() -> None:
    shard = Trained(0)
    expected = shard.bits(values_only=True)
    image = shard.engine.begin_image(values_only=True)
    for _ in range(CHANGE_COUNT):
        shard.change()
    copied_here(shard.engine, image)
    assert bits(image.chunks) == expected


@pytest.mark.parametrize("seed", range(SCHEDULE_COUNT // 2))
def test_who_copies_and_who_changes_may_be_threads(seed: int) -> None:
    shard = Trained(seed)
    engine = shard.engine
    pushes = {name: shard.push(name) for name in OPTIMIZERS}
    expected = shard.bits()
    image = engine.begin_image()
    with ThreadPoolExecutor(3) as threads:
        copying = threads.submit(engine.copy_image, image)

        def update(chunk: Chunk) -> None:
            for name, push in pushes.items():
                shard.shards.apply(chunk, [push], name)

        # Chunks are mostly updated from the last one down.
        updates = [threads.submit(update, each) for each in reversed(shard.chunks)]
        for each in (*updates, copying):
            each.result()
    assert bits(image.chunks) == expected


def test_an_image_that_nobody_wants_owes_nothing_and_keeps_nothing() -> None:
    shard = Trained(1)
    engine = shard.engine
    image = engine.begin_image()
    image.take(0)
    image.abandon("nobody wants it any more")
    for chunk in shard.chunks:
        image.take(chunk.index)
    shard.change()
    engine.end_image(image)

    assert image.failure == "nobody wants it any more"
    assert image.chunks == {}
    assert engine._pending is None


def test_a_chunk_that_is_copied_while_its_image_is_abandoned_is_not_kept() -> None:
    image: PendingImage[str] = PendingImage([0, 1], lambda index: leave(index))

    def leave(index: int) -> str:
        if index == 1:
            image.abandon("nobody wants it any more")
        return f"chunk {index}"

    image.take(0)
    assert image.chunks == {0: "chunk 0"}
    image.take(1)
    assert image.chunks == {}


def test_a_newer_cut_takes_the_place_of_one_that_is_not_copied() -> None:
    shard = Trained(2)
    engine = shard.engine
    first = engine.begin_image()
    shard.change()
    expected = shard.bits()
    second = engine.begin_image()
    shard.change()
    # The thread of the first one ends while the second one is owed most.
    copied_here(engine, first)
    for _ in range(CHANGE_COUNT):
        shard.change()
    copied_here(engine, second)

    assert "newer cut" in first.failure
    assert first.chunks == {}
    assert bits(second.chunks) == expected


def test_an_update_goes_on_when_its_chunk_cannot_be_copied() -> None:
    """There may be memory for training and none for an image."""
    shard = Trained(3)
    engine = shard.engine
    image = engine.begin_image()
    image.take(0)

    def none_left(_chunk_index: int) -> ChunkImage:
        raise MemoryError("none left")

    image._copy = none_left
    before = shard.bits()
    for chunk in shard.chunks:
        shard.shards.apply(chunk, [shard.push("a/b")], "a/b")
    copied_here(engine, image)

    assert image.failure == "MemoryError"
    assert image.chunks == {}
    assert shard.bits() != before
