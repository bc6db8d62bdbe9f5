"""The engine's edge: what it refuses, seeds, images, torn workers, threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from psserver.shard.tensors.apply_engine import ApplyEngine
from pswire.frames import decode_chunk, split_fields
from pswire.job_terms import JobTerms
from pswire.limits import CHUNK_BYTES_MAX, CHUNK_COUNT_WANTED
from pswire.optimizers import SUPPORTED
from pswire.placement import place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import (
    ElementType,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from pswire.torch_types import buffer_of, tensor_from_buffer
from tests.unit.psserver.shard.tensors.shards import Push, Shards

SGD_VALUES = (0.5, 0.0, 0.0, 0.0, 0.0, 0.0)
SCHEMA = ModelSchema(
    (
        SchemaEntry(name="weight", shape=(2, 2), element_type=ElementType.FLOAT32),
        SchemaEntry(name="frozen", shape=(3,), element_type=ElementType.FLOAT32),
        SchemaEntry(name="bias", shape=(2,), element_type=ElementType.FLOAT32),
    )
)


def sgd(
    *entry_indexes: int, values: tuple[float, ...] = SGD_VALUES, name: str = "optimizer"
) -> OptimizerSpec:
    return OptimizerSpec(
        name, "SGD", SUPPORTED["SGD"].names, (ParameterGroup(entry_indexes, values),)
    )


def engine_of(spec: OptimizerSpec, schema: ModelSchema = SCHEMA) -> ApplyEngine:
    return ApplyEngine(JobTerms(schema=schema, optimizers=(spec,)), place(schema, 1), 0)


def refusal_of(call: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


def values_of(engine: ApplyEngine) -> list[float]:
    data = memoryview(engine.vectors.read(0))
    return tensor_from_buffer(data, ElementType.FLOAT32).tolist()


@pytest.mark.parametrize(
    ("chunk_index", "presence", "byte_count", "says"),
    [
        (7, (True, False, True), 24, "chunk 7 is not one of shard 0's 1 chunks"),
        (0, (True, False), 16, "has 3 slices, the presence bits are 2"),
        (0, (True, True, True), 36, "slice of tensor 1"),
        (0, (True, False, True), 20, "take 24 bytes, 20 came"),
        (0, (False, False, True), 24, "take 8 bytes, 24 came"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(
    chunk_index: int, presence: tuple[bool, ...], byte_count: int, says: str
) -> None:
    engine = engine_of(sgd(0, 2))
    refusal = refusal_of(
        lambda: engine.check_chunk(
            chunk_index, presence, byte_count, optimizer="optimizer"
        )
    )
    assert refusal.reason == ErrorReason.CHUNK_INVALID
    assert says in refusal.message


@pytest.mark.parametrize(
    ("presence", "byte_count"),
    [((True, False, True), 24), ((False, False, True), 8), ((False,) * 3, 0)],
)
def test_a_chunk_that_fits_is_taken(
    presence: tuple[bool, ...], byte_count: int
) -> None:
    engine_of(sgd(0, 2)).check_chunk(0, presence, byte_count, optimizer="optimizer")


def test_another_optimizer_or_other_groups_are_refused() -> None:
    engine = engine_of(sgd(0, 2))
    for call in (
        lambda: engine.check_chunk(0, (True, False, True), 24, optimizer="critic"),
        lambda: engine.declared.check_hyperparameters("critic", [SGD_VALUES]),
        lambda: engine.declared.check_hyperparameters("optimizer", [SGD_VALUES] * 2),
    ):
        assert refusal_of(call).reason == ErrorReason.OPTIMIZER_MISMATCH


def test_optimizers_that_a_shard_cannot_run_are_refused_at_once() -> None:
    muon = OptimizerSpec("optimizer", "Muon", (), ())
    assert (
        refusal_of(lambda: engine_of(muon)).reason == ErrorReason.OPTIMIZER_UNSUPPORTED
    )
    negative = sgd(0, values=(-0.5, *SGD_VALUES[1:]))
    assert (
        refusal_of(lambda: engine_of(negative)).reason
        == ErrorReason.HYPERPARAMETER_INVALID
    )
    assert refusal_of(lambda: engine_of(sgd(3))).message.startswith("'optimizer' names")
    indexes = ModelSchema(
        (SchemaEntry(name="ids", shape=(2,), element_type=ElementType.INT64),)
    )
    assert "int64" in refusal_of(lambda: engine_of(sgd(0), indexes)).message


def test_a_seed_is_seen_only_when_it_is_committed() -> None:
    engine = engine_of(sgd(0))
    seed = torch.arange(9.0)

    engine.begin_seed()
    engine.write_seed(0, buffer_of(seed))
    assert values_of(engine) == [0.0] * 9

    engine.begin_seed()
    refusal = refusal_of(lambda: engine.write_seed(0, buffer_of(seed[:8])))
    assert refusal.reason == ErrorReason.CHUNK_INVALID
    assert "takes 36 bytes, 32 came" in refusal.message
    engine.write_seed(0, buffer_of(seed))
    engine.commit_seed()
    assert values_of(engine) == seed.tolist()


def test_an_image_and_present_slices_are_copies() -> None:
    parameters = [torch.nn.Parameter(torch.full((2,), 4.0)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=1)
    engine = shards.engines[0]
    image, ends = engine.image_of(0), engine.vectors.read(0, (True, False, True))

    shards.step([Push("w0", 1, [torch.ones(2)] * 3)])

    assert [each.tolist() for each in shards.values()] == [[3.0, 3.0]] * 3
    assert image.values.tolist() == [4.0] * 6
    assert (
        tensor_from_buffer(memoryview(ends), ElementType.FLOAT32).tolist() == [4.0] * 4
    )


def test_a_torn_contribution_changes_nothing_and_is_named() -> None:
    parameters = [torch.nn.Parameter(torch.full((2,), 4.0)) for _ in range(2)]
    optimizer = torch.optim.Adam(parameters)
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=1)

    torn = Push("w1", 1, [torch.full((2,), float("nan"))] * 2)
    (applied,) = shards.step([torn])
    assert applied.torn_worker_ids == ("w1",)
    assert applied.presence == (False, False)
    assert shards.step_counts(0) == {0}
    assert [each.tolist() for each in shards.values()] == [[4.0, 4.0]] * 2

    (applied,) = shards.step([torn, Push("w0", 1, [torch.ones(2), None])])
    assert applied.torn_worker_ids == ("w1",)
    assert applied.presence == (True, False)
    assert shards.step_counts(0) == {1}
    assert shards.step_counts(1) == {0}


def test_chunks_may_be_applied_by_threads_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MIN", 64)
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MAX", 4096)
    first_values = torch.linspace(-1, 1, 40_000)
    gradients = [torch.cos(first_values * (1 + step)) for step in range(5)]

    def train(thread_count: int) -> torch.Tensor:
        parameter = torch.nn.Parameter(first_values.clone())
        optimizer = torch.optim.NAdam([parameter])
        shards = Shards([parameter], {"optimizer": optimizer}, shard_count=1)
        with ThreadPoolExecutor(thread_count) as threads:
            for gradient in gradients:
                pushes = [Push("w0", 1, [gradient]), Push("w1", 2, [gradient * 2])]
                list(
                    threads.map(
                        lambda chunk, pushes=pushes: shards.apply(chunk, pushes),
                        shards.placement.chunks,
                    )
                )
        return shards.values()[0]

    assert torch.equal(train(1), train(4))


def test_a_chunk_that_is_read_during_updates_is_never_half_of_one() -> None:
    count = CHUNK_COUNT_WANTED * CHUNK_BYTES_MAX // 4
    parameter = torch.nn.Parameter(torch.zeros(count))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    shards = Shards([parameter], {"optimizer": optimizer}, shard_count=1)
    push = Push("w0", 1.0, [torch.ones(count)])
    seen = [0.0]

    with ThreadPoolExecutor(1) as threads:
        updates = threads.submit(lambda: [shards.step([push]) for _ in range(30)])
        while not updates.done():
            parts = []
            for message in shards.engines[0].encode(0, 1):
                ((_, view),) = split_fields(message)
                frame = decode_chunk(view)
                frame.verify()
                parts.append(tensor_from_buffer(frame.data, ElementType.FLOAT32))
            assert len(parts) > 1
            values = torch.cat(parts)
            assert torch.equal(values, values[:1].expand_as(values))
            seen.append(-float(values[0]))
        updates.result()

    assert seen == sorted(seen)
