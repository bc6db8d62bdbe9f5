"""Short ways to write the core's values down."""

from collections.abc import Iterable

from psserver.shard.core.clock_commits import proof_of_choice
from psserver.shard.core.push import PushId, StagedChunk, Trailer
from pswire.job_terms import JobTerms
from pswire.membership import (
    ClockChoice,
    Departure,
    FenceKind,
    Member,
    MixedClock,
    Mode,
    Record,
    WorkerKey,
)
from pswire.optimizers import SUPPORTED
from pswire.schema import (
    ElementType,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)

SCHEMA = ModelSchema(
    (SchemaEntry(name="weight", shape=(3,), element_type=ElementType.FLOAT32),)
)


def sgd(
    name: str = "optimizer", groups: tuple[tuple[int, ...], ...] = ((0,),)
) -> OptimizerSpec:
    """Plain SGD over these tensors, one tuple of positions for each group."""
    names = SUPPORTED["SGD"].names
    values = tuple(0.1 if each == "lr" else 0.0 for each in names)
    return OptimizerSpec(
        name=name,
        class_name="SGD",
        hyperparameter_names=names,
        groups=tuple(ParameterGroup(indexes, values) for indexes in groups),
    )


OPTIMIZERS = (sgd(),)
TERMS = JobTerms(schema=SCHEMA, optimizers=OPTIMIZERS)


def key(name: str) -> WorkerKey:
    """`a` or `a/2`."""
    worker_id, _, incarnation = name.partition("/")
    return WorkerKey(worker_id, int(incarnation or 1))


def member(
    name: str, base_clock: int = 0, rank: int = 0, base_sequence: int = 0
) -> Member:
    return Member(
        worker=key(name),
        rank=rank,
        base_clock=base_clock,
        base_sequence=base_sequence,
    )


def departure(
    name: str,
    *,
    base_clock: int = 0,
    base_sequence: int = 0,
    last_clock: int,
    evicted: bool = False,
) -> Departure:
    return Departure(
        member=member(name, base_clock, base_sequence=base_sequence),
        last_clock=last_clock,
        evicted=evicted,
    )


def choice(clock: int, *names: str) -> ClockChoice:
    """A clock with those whose pushes it consists of."""
    return ClockChoice(clock, tuple(map(key, names)))


def chosen_by_first(clock: int, *names: str) -> ClockChoice:
    """The same as shard 0 has chosen it, in a job without a key."""
    found = choice(clock, *names)
    return found._replace(proof=proof_of_choice(b"", found))


def record(
    bases: dict[str, int],
    *,
    generation: int = 1,
    departures: tuple[Departure, ...] = (),
    departed_step_count: int = 0,
    skipped_clocks: tuple[int, ...] = (),
    mixed_clocks: tuple[MixedClock, ...] = (),
    mode: Mode = Mode.BSP,
    staleness_bound: int = 0,
    mode_clock: int = 0,
    base_sequences: dict[str, int] | None = None,
    commit: ClockChoice | None = None,
) -> Record:
    """A record of members with their base clocks; fence and generation are one."""
    sequences = base_sequences or {}
    return Record(
        fence_number=generation,
        generation=generation,
        kind=FenceKind.START if generation == 1 else FenceKind.MEMBERSHIP,
        members=tuple(
            member(name, base_clock, rank, sequences.get(name, 0))
            for rank, (name, base_clock) in enumerate(bases.items())
        ),
        departures=departures,
        departed_step_count=departed_step_count,
        skipped_clocks=skipped_clocks,
        mixed_clocks=mixed_clocks,
        mode=mode,
        staleness_bound=staleness_bound,
        mode_clock=mode_clock,
        commit=commit,
    )


def trailer(
    chunk_indexes: Iterable[int] = (),
    *,
    weight: float = 1.0,
    optimizer: str = "optimizer",
    rate: float = 0.1,
    finite: bool = True,
) -> Trailer:
    return Trailer(
        optimizer=optimizer,
        weight=weight,
        hyperparameters=((rate,),),
        finite=finite,
        chunk_indexes=frozenset(chunk_indexes),
    )


def chunk(payload: object = b"", *, digest: int | None = None) -> StagedChunk:
    return StagedChunk(
        digest=hash(payload) if digest is None else digest,
        presence=(True,),
        payload=payload,
    )


def push_id(name: str, sequence: int = 1) -> PushId:
    return PushId(key(name), sequence)
