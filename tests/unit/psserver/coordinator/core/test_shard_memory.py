"""A model that its shards can't hold is refused before any of them tries."""

import pytest

from psserver.coordinator.core.coordinator_effects import SchemaFixed
from psserver.coordinator.core.shard_map import ShardSlot
from psserver.coordinator.core.shard_memory import PROCESS_BYTES, ModelMemory
from psserver.edge.coordinator_settings import CheckpointSettings, CoordinatorSettings
from psserver.edge.memory_grant import MemoryGrant
from pswire.aggregation import Aggregation
from pswire.compression import NO_COMPRESSION, Compression
from pswire.job_terms import JobTerms
from pswire.membership import Mode, WorkerState
from pswire.optimizers import SUPPORTED
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import (
    ElementType,
    EntryKind,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from tests.doubles.driven_coordinator import DrivenCoordinator

GIB = 1 << 30


def tensor(
    name: str,
    count: int,
    element_type: ElementType = ElementType.FLOAT32,
    kind: EntryKind = EntryKind.PARAMETER,
) -> SchemaEntry:
    return SchemaEntry(name=name, shape=(count,), element_type=element_type, kind=kind)


def optimizer(
    class_name: str, *indexes: int, name: str = "optimizer", **values: float
) -> OptimizerSpec:
    names = SUPPORTED[class_name].names
    group = ParameterGroup(
        entry_indexes=indexes,
        hyperparameters=tuple(values.get(each, 0.0) for each in names),
    )
    return OptimizerSpec(
        name=name, class_name=class_name, hyperparameter_names=names, groups=(group,)
    )


def memory(*optimizers: OptimizerSpec, kept_count: int = 0) -> ModelMemory:
    """Of ten floats, ten halves and a buffer of ten bytes."""
    schema = ModelSchema(
        (
            tensor("w", 10),
            tensor("h", 10, ElementType.BFLOAT16),
            tensor("b", 10, ElementType.INT8, EntryKind.BUFFER),
        )
    )
    return ModelMemory.of(schema, optimizers, kept_count)


def test_values_are_of_all_tensors() -> None:
    assert memory(optimizer("SGD")) == ModelMemory(values=70, state=0, members=0)


@pytest.mark.parametrize(
    ("spec", "state"),
    [
        (optimizer("SGD", 0), 0),
        (optimizer("SGD", 0, momentum=0.9), 40),
        (optimizer("Adam", 0), 80),
        (optimizer("Adam", 0, amsgrad=1.0), 120),
        # With master values, and state of the same type.
        (optimizer("SGD", 1), 40),
        (optimizer("Adam", 1), 120),
    ],
)
def test_state_is_what_the_optimizer_keeps(spec: OptimizerSpec, state: int) -> None:
    assert memory(spec).state == state


def test_two_optimizers_keep_state_each_and_master_values_once() -> None:
    first, second = optimizer("Adam", 1), optimizer("SGD", 1, name="b", momentum=0.9)
    assert memory(first, second).state == 40 + 80 + 40


def test_of_two_declarations_of_one_optimizer_the_larger_counts() -> None:
    first, second = optimizer("SGD", 0), optimizer("SGD", 0, momentum=0.9)
    assert memory(first, second).state == memory(second, first).state == 40


def test_what_is_kept_for_members_is_of_what_is_updated() -> None:
    assert memory(optimizer("SGD", 0), kept_count=3).members == 120


def test_a_checkpoint_takes_a_copy_of_values_and_state() -> None:
    schema = ModelSchema((tensor("w", 10), tensor("h", 10, ElementType.BFLOAT16)))
    need = ModelMemory.of(schema, [optimizer("Adam", 0, 1)], 1, makes_checkpoints=True)
    assert (need.values, need.state, need.members) == (60, 200, 60)
    assert need.image == 260
    assert need.byte_count == 60 + 200 + 60 + 260


def slots(*grants: MemoryGrant) -> list[ShardSlot]:
    return [ShardSlot(index=i, memory=grant) for i, grant in enumerate(grants)]


def test_a_model_that_fits_exactly_is_taken() -> None:
    need = ModelMemory(values=2 * GIB, state=0, members=0)
    need.check_fits(slots(*[MemoryGrant(GIB + PROCESS_BYTES, "")] * 2))
    with pytest.raises(Refusal):
        need.check_fits(slots(*[MemoryGrant(GIB + PROCESS_BYTES - 1, "")] * 2))


def test_the_refusal_names_both_numbers_and_how_many_shards_would_do() -> None:
    need = ModelMemory(values=4 << 40, state=8 << 40, members=0)
    grants = MemoryGrant(64 * GIB, "a"), MemoryGrant(16 * GIB, "b")
    with pytest.raises(Refusal) as caught:
        need.check_fits(slots(*grants))
    assert caught.value.reason is ErrorReason.MEMORY_EXCEEDED
    assert "each of 2 shards would take 6.0 TiB" in caught.value.message
    assert "shard 0 may use 64.0 GiB" in caught.value.message
    wanted = -(-need.byte_count // (64 * GIB - PROCESS_BYTES))
    assert f"{wanted} shards would do" in caught.value.message
    need.check_fits(slots(*[MemoryGrant(64 * GIB, "")] * wanted))


def test_shards_of_one_machine_share_its_memory() -> None:
    need = ModelMemory(values=3 * GIB, state=0, members=0)
    need.check_fits(slots(MemoryGrant(2 * GIB, "a"), MemoryGrant(2 * GIB, "b")))
    with pytest.raises(Refusal, match=r"shards 0, 1 share 2\.0 GiB"):
        need.check_fits(slots(*[MemoryGrant(2 * GIB, "a")] * 2))


def test_a_shard_that_does_not_say_what_it_may_use_is_trusted() -> None:
    ModelMemory(values=1 << 50, state=0, members=0).check_fits(slots(MemoryGrant()))


def test_with_less_memory_than_a_process_takes_no_number_would_do() -> None:
    need = ModelMemory(values=1, state=0, members=0)
    with pytest.raises(Refusal, match="no number of shards"):
        need.check_fits(slots(MemoryGrant(PROCESS_BYTES, "")))


HUGE = ModelSchema((tensor("w", 1 << 40),))
SMALL = ModelSchema((tensor("w", 1 << 20),))


def job(byte_count: int, **settings: object) -> DrivenCoordinator:
    """A job whose shards may use so much each."""
    driven = DrivenCoordinator(
        settings=CoordinatorSettings(job_id="job", shard_count=2, **settings)  # type: ignore[arg-type]
    )
    for index in range(2):
        register(driven, index, byte_count)
    driven.forget()
    return driven


def register(driven: DrivenCoordinator, index: int, byte_count: int) -> None:
    driven.core.register_shard(
        process_id=f"s{index}",
        address=f"host:{index}",
        now_ms=0,
        memory=MemoryGrant(byte_count, f"host {index}"),
    )


def join(
    driven: DrivenCoordinator,
    schema: ModelSchema,
    spec: OptimizerSpec,
    compression: Compression = NO_COMPRESSION,
) -> None:
    entry = driven.register("a")
    driven.watch(entry)
    driven.core.join(
        entry,
        terms=JobTerms(schema=schema, optimizers=(spec,), compression=compression),
        loaders=(),
        now_ms=0,
    )


def test_a_model_that_no_shard_can_hold_reaches_none() -> None:
    driven = job(16 * GIB)
    with pytest.raises(Refusal, match="does not fit"):
        join(driven, HUGE, optimizer("SGD", 0, lr=1.0))
    assert driven.core.model.schema is None
    assert driven.of(SchemaFixed) == []
    join(driven, SMALL, optimizer("SGD", 0, lr=1.0))
    assert driven.core.model.schema == SMALL


def test_optimizer_state_counts_at_the_join_and_when_it_is_declared_later() -> None:
    tight = PROCESS_BYTES + (5 << 20)
    with pytest.raises(Refusal, match=r"optimizer state 8\.0 MiB"):
        join(job(tight), SMALL, optimizer("Adam", 0, lr=1.0, eps=1.0))
    driven = job(tight)
    half = 1 << 19
    two = ModelSchema((tensor("w", half), tensor("v", half)))
    join(driven, two, optimizer("Adam", 0, lr=1.0, eps=1.0))
    later = optimizer("Adam", 0, 1, lr=1.0, eps=1.0)
    (entry,) = driven.core.roster.in_state(WorkerState.JOINING)
    with pytest.raises(Refusal, match=r"optimizer state 8\.0 MiB"):
        driven.core.declare_optimizer(entry, later, 0)
    assert driven.core.model.terms is not None
    assert driven.core.model.terms.declared == ()


def test_gradients_of_several_members_count_in_bsp() -> None:
    tight = PROCESS_BYTES + (3 << 20)
    spec = optimizer("SGD", 0, lr=1.0)
    with pytest.raises(Refusal, match=r"for members 8\.0 MiB"):
        join(job(tight, workers_min=2), SMALL, spec)
    join(job(tight, workers_min=2, mode=Mode.ASP), SMALL, spec)


def test_looking_at_gradients_one_by_one_counts() -> None:
    room = PROCESS_BYTES + (30 << 20)
    spec = optimizer("SGD", 0, lr=1.0)
    join(job(room, workers_min=2), SMALL, spec)
    # Two gradients, and four threads on each of two shards with four chunks of them.
    rule = Aggregation.parse("median")
    with pytest.raises(Refusal, match=r"for members 128\.0 MiB"):
        join(job(room, workers_min=2, aggregation=rule), SMALL, spec)
    with pytest.raises(Refusal, match=r"for members 128\.0 MiB"):
        join(job(room, workers_min=2, gradient_norm_max=1.0), SMALL, spec)


def test_the_copy_for_checkpoints_counts_where_some_are_made() -> None:
    tight = PROCESS_BYTES + (3 << 20)
    spec = optimizer("SGD", 0, lr=1.0)
    join(job(tight), SMALL, spec)
    checkpoints = CheckpointSettings(url="/folder")
    with pytest.raises(Refusal, match=r"for checkpoints 4\.0 MiB"):
        join(job(tight, checkpoints=checkpoints), SMALL, spec)


def test_a_shard_that_comes_later_and_is_too_small_is_refused() -> None:
    driven = DrivenCoordinator(shard_count=2)
    join(driven, SMALL, optimizer("SGD", 0, lr=1.0))
    with pytest.raises(Refusal, match="does not fit"):
        register(driven, 0, 1 << 20)
    assert driven.core.shards.slots[0].process_id == ""
    register(driven, 0, GIB)
    assert driven.core.shards.slots[0].process_id == "s0"
