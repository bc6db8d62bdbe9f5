"""Images of chunks, put together for any placement, are the same bit by bit."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO, RawIOBase
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import pytest
import torch

from psserver.shard.core.core_image import CoreImage
from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.chunk_image import ChunkImage
from psserver.shard.tensors.contribution import Contribution
from psserver.shard.tensors.optimizer_state import part_of, spans_of
from psserver.shard.tensors.recut_images import Source, put_together
from psserver.shard.tensors.shard_image import PartOfImage, ShardImage
from pswire.checkpoint.errors import DamagedError
from pswire.checkpoint.manifest import FilePart
from pswire.checkpoint.parts import PartReader, write_part
from pswire.checkpoint.recut import Recut
from pswire.optimizer_classes import class_named
from pswire.optimizer_states import StateKey
from pswire.optimizers import SUPPORTED
from pswire.placement import place
from pswire.reasons import Refusal
from pswire.schema import ParameterGroup
from pswire.torch_types import buffer_of
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.doubles.saved_shards import image_of
from tests.unit.psserver.shard.tensors.shards import Push, Shards
from tests.unit.psserver.shard.tensors.test_sparse_updates import (
    SparseShards,
    gradients,
    optimizer_over,
)
from tests.unit.psserver.shard.tensors.test_sparse_updates import (
    make_parameters as make_tables,
)

SHARD_COUNTS: Final = (1, 2, 3, 5, 8)

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.5},
}
"""Switches by which an optimizer keeps all that it can."""

small_chunks = cut_into(64, 256)
"""Cuts a model of two KiB into several chunks."""

CORE: Final = CoreImage(version=0, applied_clock=0, frontier=0, windows=(), used={})


def written(
    image: ShardImage, changed: Mapping[str, torch.Tensor | None] | None = None
) -> PartOfImage:
    """A shard's part, of which some tensors were changed."""
    tensors = {**image.tensors(), **(changed or {})}
    with TemporaryDirectory() as folder:
        path = Path(folder, "part")
        kept = {name: each for name, each in tensors.items() if each is not None}
        stored = write_part(path, kept, image.metadata())
        data = path.read_bytes()
    file = cast("RawIOBase", BytesIO(data))
    part = PartReader(file, FilePart("part", *stored), "part")
    return PartOfImage(part)


def onto(shards: Shards, shard_count: int, chunk_bytes: int) -> Shards:
    """Other shards, which go on from what these have written."""
    parts = [
        written(image_of(shards, index, CORE)) for index in range(len(shards.engines))
    ]
    made = copy.copy(shards)
    made.placement = place(shards.schema, shard_count, chunk_bytes)
    made.engines = [
        ApplyEngine(shards.terms, made.placement, shard_index)
        for shard_index in range(shard_count)
    ]
    recut = Recut(shards.placement)
    for engine in made.engines:
        engine.begin_seed()
    for chunk in made.placement.chunks:
        engine = made.engines[chunk.shard_index]
        runs = list(recut.runs(chunk))
        sources = {
            each.index: Source(each, parts[each.shard_index].read(each))
            for each in (shards.placement.chunks[run.chunk_index] for run in runs)
        }
        image = put_together(chunk, runs, sources, engine.declared)
        engine.write_seed_image(chunk.index, image)
    for engine in made.engines:
        engine.commit_seed()
    return made


def fingerprint(shards: Shards) -> str:
    """SHA-256 of all numbers by tensors, whatever the chunks are."""
    parts: dict[tuple[int, str, str], list[bytes]] = {}
    for chunk in shards.placement.chunks:
        image = shards.engines[chunk.shard_index].image_of(chunk.index)
        edges = [0, *accumulate(piece.element_count for piece in chunk.slices)]
        for position, (start, stop) in enumerate(pairwise(edges)):
            entry = chunk.slices[position].entry_index
            found = {("", "value"): image.values[start:stop]}
            if image.master is not None:
                found["", "master"] = image.master[start:stop]
            for optimizer, held in image.states.items():
                for span in spans_of(held.state):
                    if span.first <= position < span.stop:
                        begin = start - edges[span.first]
                        for name, value in span.state.items():
                            part = part_of(value, begin, stop - start)
                            found[optimizer, name] = part
            for (optimizer, name), part in found.items():
                pieces = parts.setdefault((entry, optimizer, name), [])
                data = bytes(buffer_of(part.contiguous()))
                if part.ndim or data not in pieces:
                    pieces.append(data)
    joined = [(place, b"".join(pieces)) for place, pieces in sorted(parts.items())]
    return hashlib.sha256(repr(joined).encode()).hexdigest()


def mixed_parameters(generator: torch.Generator) -> list[torch.nn.Parameter]:
    """Of 16, 32 and 64 bits, trained and not, with what only a buffer may be."""

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

    def fixed(tensor: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=False)

    return [
        floats(30, 7, dtype=torch.bfloat16),
        floats(5, dtype=torch.bfloat16),
        fixed(torch.randn(9, generator=generator).bfloat16()),
        floats(40, 7),
        floats(),
        floats(1),
        floats(33, 5),
        floats(11, 3, dtype=torch.float64),
        floats(50, dtype=torch.float16),
        fixed(torch.arange(40)),
        fixed(torch.arange(3) > 1),
    ]


TRAINED: Final = (0, 1, 3, 4, 5, 6, 7, 8)


def draw(generator: torch.Generator, indexes: Sequence[int]) -> Push:
    """Gradients of some of the parameters."""
    drawn = [
        torch.randn(each.shape, generator=generator).to(each.dtype)
        if index in indexes
        else None
        for index, each in enumerate(mixed_parameters(torch.Generator()))
    ]
    return Push("w0", 1, drawn)


def train(shards: Shards, seed: int, step_count: int) -> None:
    """Updates by two optimizers."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(step_count):
        shards.step([draw(generator, TRAINED[:5])], "a/b")
        shards.step([draw(generator, TRAINED[5:])], "other")


def trained(class_name: str, shard_count: int) -> Shards:
    """Shards after a few updates, of which some parameters had one more."""
    generator = torch.Generator().manual_seed(3)
    parameters = mixed_parameters(generator)
    own = [parameters[index] for index in TRAINED]
    optimizers = {
        "a/b": class_named(class_name)(
            own[:5], lr=0.01, **SETTINGS.get(class_name, {})
        ),
        "other": torch.optim.AdamW(own[5:], lr=0.01),
    }
    shards = Shards(parameters, optimizers, shard_count=shard_count)
    train(shards, 4, 1)
    shards.step([draw(generator, TRAINED[1:3])], "a/b")
    train(shards, 5, 2)
    return shards


@pytest.mark.parametrize("shard_count", SHARD_COUNTS)
@pytest.mark.parametrize("class_name", sorted({*SUPPORTED} - {"SparseAdam"}))
def test_any_number_of_shards_has_the_same_bits(
    class_name: str, shard_count: int
) -> None:
    shards = trained(class_name, shard_count)
    before = fingerprint(shards)
    for other_count, chunk_bytes in zip(SHARD_COUNTS, (0, 192, 0, 64, 0), strict=True):
        assert fingerprint(onto(shards, other_count, chunk_bytes)) == before


@pytest.mark.parametrize("class_name", sorted({*SUPPORTED} - {"SparseAdam"}))
def test_they_go_on_as_if_nothing_had_happened(class_name: str) -> None:
    shards = trained(class_name, 2)
    same, others = onto(shards, 2, 0), onto(shards, 3, 192)

    for each in (shards, same, others):
        train(each, 6, 4)

    assert fingerprint(same) == fingerprint(shards)
    # Torch's kernels round the last elements of a vector in their own way.
    for index, (mine, theirs) in enumerate(
        zip(others.values(), shards.values(), strict=True)
    ):
        scale = DEVIATION_MAX if theirs.element_size() >= 4 else 2**-8
        assert torch.allclose(mine.double(), theirs.double(), scale, scale), index


@pytest.mark.parametrize("class_name", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_that_are_sent_rows_have_the_same_bits(
    class_name: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(7)
    parameters = make_tables(generator, dtype)
    settings = SETTINGS.get(class_name, {})
    optimizer = optimizer_over(class_name, parameters, lr=0.1, **settings)
    shards = SparseShards(parameters, {"optimizer": optimizer}, shard_count=3)

    def update(of: Shards, push: Push) -> None:
        assert isinstance(of, SparseShards)
        of.train([push])

    for _ in range(6):
        update(shards, Push("w0", 1, gradients(generator, class_name, dtype)))
    before = fingerprint(shards)
    assert {fingerprint(onto(shards, count, 0)) for count in SHARD_COUNTS} == {before}

    same = onto(shards, 3, 0)
    for _ in range(6):
        push = Push("w0", 1, gradients(generator, class_name, dtype))
        update(shards, push)
        update(same, push)
    assert fingerprint(same) == fingerprint(shards) != before


def test_masters_are_kept_and_not_made_from_rounded_values() -> None:
    shards = trained("Adam", 1)
    (engine,) = shards.engines
    lost = 0
    for chunk in shards.placement.chunks:
        image = engine.image_of(chunk.index)
        if image.master is not None:
            lost += int((image.master != image.values.float()).sum())
    assert lost > 50
    (made,) = onto(shards, 1, 0).engines
    assert made.state_byte_count == engine.state_byte_count


def test_neighbours_with_one_history_are_updated_together_again() -> None:
    parameters = [torch.nn.Parameter(torch.randn(8)) for _ in range(64)]
    optimizers = {"optimizer": torch.optim.Adam(parameters)}
    shards = Shards(parameters, optimizers, shard_count=8)
    push = Push("w0", 1, [torch.randn(8) for _ in parameters])
    shards.step([push])

    made = onto(shards, 1, 192)

    (engine,) = made.engines
    runs = [engine.run_count("optimizer", each.index) for each in made.placement.chunks]
    assert set(runs) == {1}


# Declarations, and updates of some chunks alone


def update(shards: Shards, spec_digest: str, chunk_indexes: Sequence[int]) -> None:
    """One update of some chunks under a declaration, with gradients of ones."""
    (parameter, *others) = shards.first_values
    for index in chunk_indexes:
        chunk = shards.placement.chunks[index]
        presence, data = shards.gather(chunk, [torch.ones_like(parameter), *others])
        shards.engines[chunk.shard_index].apply(
            index,
            optimizer="optimizer",
            contributions=[
                Contribution(worker_id="w0", weight=1, presence=presence, data=data)
            ],
            total_weight=1,
            hyperparameters=shards.hyperparameters("optimizer"),
            spec_digest=spec_digest,
        )


def declared_anew(exchange_count: int) -> tuple[Shards, str]:
    """Shards of one parameter in four chunks, updated once, and a later declaration."""
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.Adam([parameter])
    shards = Shards([parameter], {"optimizer": optimizer}, shard_count=4)
    assert len(shards.placement.chunks) == 4
    update(shards, "", range(4))
    optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(0))})
    first = shards.terms.optimizers[0]
    group = ParameterGroup((), first.groups[0].hyperparameters)
    later = replace(first, groups=(*first.groups, group), exchange_count=exchange_count)
    shards.terms = replace(shards.terms, optimizers=(first, later))
    for engine in shards.engines:
        engine.declare(later)
    return shards, later.digest


def test_state_goes_on_under_the_declaration_that_it_had() -> None:
    shards, later = declared_anew(0)
    update(shards, later, range(4))
    same = onto(shards, 4, 0)
    for index in range(4):
        metadata = image_of(same, index, CORE).metadata()
        assert later in metadata["declared"]
        assert metadata == image_of(shards, index, CORE).metadata()
    assert fingerprint(onto(shards, 1, 128)) == fingerprint(shards)


@pytest.mark.parametrize("exchange_count", [0, 1])
def test_chunks_of_two_declarations_are_put_together_under_the_newer(
    exchange_count: int,
) -> None:
    shards, later = declared_anew(exchange_count)
    update(shards, later, [1])
    made = onto(shards, 1, 256)
    held = made.engines[0].image_of(0).states
    if exchange_count:  # another optimizer, that begins without
        assert held == {}
    else:
        assert held["optimizer"].spec_digest == later


def test_of_parts_with_unequal_updates_the_most_count() -> None:
    """As when a worker's bytes of one chunk were left out."""
    shards, _ = declared_anew(0)
    update(shards, "", [0, 2, 3])
    made = onto(shards, 1, 256)
    assert made.step_counts(0) == {2}
    elements = [
        shards.engines[index]
        .image_of(index)
        .states["optimizer"]
        .state[StateKey(0, 1, "exp_avg")]
        for index in range(4)
    ]
    state = made.engines[0].image_of(0).states["optimizer"].state
    assert torch.equal(state[StateKey(0, 1, "exp_avg")], torch.cat(elements))


def test_a_tensor_of_which_a_part_was_never_updated_begins_without_state() -> None:
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizers = {"optimizer": torch.optim.Adam([parameter])}
    shards = Shards([parameter], optimizers, shard_count=4)
    update(shards, "", [0, 1, 2])
    assert onto(shards, 1, 256).step_counts(0) == {0}


# What is not as it should be


def image_with(changed: Mapping[str, torch.Tensor | None]) -> ChunkImage:
    """What is read of a chunk of two parameters, of which some tensors were changed."""
    parameters = [torch.nn.Parameter(torch.randn(6).bfloat16()) for _ in range(2)]
    optimizers = {"optimizer": torch.optim.Adam(parameters)}
    shards = Shards(parameters, optimizers, shard_count=1)
    shards.step([Push("w0", 1, [torch.randn(6).bfloat16() for _ in parameters])])
    return written(image_of(shards, 0, CORE), changed).read(shards.placement.chunks[0])


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"value/0": None}, "has no tensor value/0"),
        ({"value/0": torch.zeros(12)}, "of torch.float32, where 12 of torch.bfloat16"),
        ({"value/0": torch.zeros(11).bfloat16()}, r"has shape \[11\]"),
        ({"master/0": torch.zeros(12).bfloat16()}, "where 12 of torch.float32 belong"),
        ({"master/0": torch.zeros(3, 4)}, r"has shape \[3, 4\]"),
        ({"other/0": torch.zeros(3)}, "which this release gives to none"),
    ],
)
def test_a_chunk_that_is_not_as_shards_write_it_is_refused(
    changed: dict[str, torch.Tensor | None], problem: str
) -> None:
    with pytest.raises(DamagedError, match=problem):
        image_with(changed)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"state/optimizer/0/0-2/step": torch.tensor(0.5)}, "'step' is 0.5"),
        ({"state/optimizer/0/0-2/exp_avg": torch.zeros(3)}, "'exp_avg' has shape"),
        ({"state/optimizer/0/0-2/exp_avg": None}, "goes on from exp_avg, exp_avg_sq"),
        ({"state/optimizer/0/1-3/step": torch.tensor(1.0)}, "names slices twice"),
        ({"state/other/0/0-2/step": torch.tensor(1.0)}, "has no optimizer 'other'"),
    ],
)
def test_state_that_is_none_is_not_staged(
    changed: dict[str, torch.Tensor | None], problem: str
) -> None:
    image = image_with(changed)
    parameters = [torch.nn.Parameter(torch.randn(6).bfloat16()) for _ in range(2)]
    optimizers = {"optimizer": torch.optim.Adam(parameters)}
    (engine,) = Shards(parameters, optimizers, shard_count=1).engines
    engine.begin_seed()
    with pytest.raises(Refusal, match=problem):
        engine.write_seed_image(0, image)
