"""Chunks of a clock whose contributions are complete, as orders to apply them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from psserver.shard.core.effects import (
    ApplyChunk,
    DeclarationsDiffer,
    HyperparametersDiffer,
    StagedContribution,
)
from psserver.shard.core.member_on_shard import MembersOnShard
from psserver.shard.core.push import PushEntry, Trailer
from pswire.membership import ClockChoice, Member, WorkerKey, longest_of


def trailers_of(entries: Mapping[WorkerKey, PushEntry]) -> dict[WorkerKey, Trailer]:
    """Trailers that are in, in the order of the entries."""
    return {w: e.trailer for w, e in entries.items() if e.trailer is not None}


def kind_of_mixed(
    members: tuple[Member, ...],
    entries: Mapping[WorkerKey, PushEntry],
    *,
    by_majority: bool = False,
) -> bool | None:
    """Whether a clock publishes in which some step and some publish.

    It does what the longest does. Whoever joined late comes to a place of its script in
    another clock than the others. What it does there must neither undo their steps nor
    end their job.

    Args:
        members: Whose entries they are, or more.
        entries: Pushes of a clock; all their trailers are in.
        by_majority: As in `source_of`.

    Returns:
        None where all do the same.
    """
    trailers = trailers_of(entries)
    kinds = {trailer.publishes for trailer in trailers.values() if trailer.weight > 0}
    if len(kinds) < 2:
        return None
    source = source_of(
        tuple(each for each in members if each.worker in trailers),
        trailers,
        by_majority=by_majority,
    )
    return trailers[source].publishes


def of_kind(
    entries: Mapping[WorkerKey, PushEntry], publishes: bool | None
) -> dict[WorkerKey, PushEntry]:
    """Entries that count in a clock of a kind: all of them where it is None."""
    if publishes is None:
        return dict(entries)
    trailers = trailers_of(entries)
    return {
        worker: entry
        for worker, entry in entries.items()
        if trailers[worker].weight == 0 or trailers[worker].publishes is publishes
    }


def orders_to_apply(
    clock: int,
    chunk_indexes: Iterable[int],
    entries: Mapping[WorkerKey, PushEntry],
    *,
    source: Trailer,
    choice: ClockChoice | None = None,
    is_weighted: bool = True,
) -> list[ApplyChunk]:
    """One order for each chunk.

    Args:
        clock: Clock they belong to; all its trailers are in.
        chunk_indexes: Chunks that every contributor has sent or will not send.
        entries: Pushes of all contributors, in the order of worker ids.
        source: Trailer whose optimizer and hyperparameters count.
        choice: With two-phase steps, what the clock consists of.
        is_weighted: Whether workers count by the samples behind their gradients.
    """
    left_out = choice.left_out_workers() if choice else frozenset()
    entries = {w: entry for w, entry in entries.items() if w not in left_out}
    factors = choice.factor_of() if choice else {}
    total_weight = total_weight_of(entries, is_weighted=is_weighted)
    return [
        ApplyChunk(
            clock=clock,
            chunk_index=index,
            optimizer=source.optimizer,
            contributions=contributions_to(
                index, entries, source, factors=factors, is_weighted=is_weighted
            ),
            total_weight=total_weight,
            hyperparameters=source.hyperparameters,
            spec_digest=source.spec_digest,
            gradient_scale=choice.gradient_scale if choice else 1.0,
        )
        for index in chunk_indexes
    ]


def total_weight_of(
    entries: Mapping[WorkerKey, PushEntry], *, is_weighted: bool = True
) -> float:
    """Weight of pushes together; not weighted, how many have any."""
    weights = [trailer.weight for trailer in trailers_of(entries).values()]
    return sum(weights if is_weighted else (float(each > 0) for each in weights))


NO_FACTORS: Final[Mapping[WorkerKey, float]] = {}


def contributions_to(
    chunk_index: int,
    entries: Mapping[WorkerKey, PushEntry],
    source: Trailer | None = None,
    *,
    factors: Mapping[WorkerKey, float] = NO_FACTORS,
    is_weighted: bool = True,
) -> tuple[StagedContribution, ...]:
    """Parts of a chunk that have weight, in the order of the entries.

    Not weighted, nobody is trusted: who has values of what the source has none of
    counts for nothing, since values replace those of the shard.
    """
    found = []
    for worker, entry in entries.items():
        chunk = entry.staged.get(chunk_index)
        trailer = entry.trailer
        if chunk is None or trailer is None or not trailer.weight > 0:
            continue
        is_alike = source is None or trailer.value_entries <= source.value_entries
        if is_weighted or is_alike:
            found.append(
                StagedContribution(
                    worker_id=worker.worker_id,
                    weight=trailer.weight if is_weighted else 1.0,
                    presence=chunk.presence,
                    payload=chunk.payload,
                    loss_scale=trailer.loss_scale,
                    factor=factors.get(worker, 1.0),
                    value_entries=trailer.value_entries,
                    is_source=trailer is source,
                )
            )
    return tuple(found)


Trailers = Mapping[WorkerKey, Trailer]


def source_of(
    contributors: tuple[Member, ...], trailers: Trailers, *, by_majority: bool = False
) -> WorkerKey:
    """Whose hyperparameters count: the longest contributor that has weight.

    Args:
        contributors: Those of a clock.
        trailers: Of each of them.
        by_majority: Whether it is the longest of those that most agree with, in a job
            whose members nobody trusts.
    """
    weighty = tuple(m for m in contributors if trailers[m.worker].weight > 0)
    if by_majority and weighty:
        said = {m.worker: _settings_of(trailers[m.worker]) for m in weighty}
        counts = Counter(said.values())
        most = max(counts.values())
        weighty = tuple(m for m in weighty if counts[said[m.worker]] == most)
    return longest_of(weighty or contributors).worker


def _settings_of(trailer: Trailer) -> tuple[object, ...]:
    """What a push says of the update, beside its gradient."""
    return (
        trailer.hyperparameters,
        trailer.spec_digest,
        trailer.loads_state,
        trailer.publishes,
        trailer.value_entries,
    )


class HyperparameterComparison:
    """Names each pair of workers that differ once."""

    def __init__(self, on_shard: MembersOnShard) -> None:
        self._on_shard = on_shard

    def differences(
        self, clock: int, used: WorkerKey, trailers: Trailers
    ) -> list[HyperparametersDiffer | DeclarationsDiffer]:
        """Workers with weight whose values differ from those used, not yet named."""
        found: list[HyperparametersDiffer | DeclarationsDiffer] = []
        for other, trailer in trailers.items():
            if trailer.weight == 0 or other == used:
                continue
            known = self._on_shard.of(other)
            if used in known.differing:
                continue
            if trailer.spec_digest != trailers[used].spec_digest:
                if used not in known.redeclared:
                    known.redeclared.add(used)
                    found.append(
                        DeclarationsDiffer(
                            clock=clock,
                            optimizer=trailer.optimizer,
                            used=used,
                            other=other,
                        )
                    )
                continue
            group = _first_difference(trailers[used], trailer)
            if group is None:
                continue
            known.differing.add(used)
            found.append(
                HyperparametersDiffer(
                    clock=clock,
                    optimizer=trailer.optimizer,
                    used=used,
                    other=other,
                    group=group,
                    values=(
                        trailers[used].hyperparameters[group],
                        trailer.hyperparameters[group],
                    ),
                )
            )
        return found


def _first_difference(mine: Trailer, theirs: Trailer) -> int | None:
    pairs = zip(mine.hyperparameters, theirs.hyperparameters, strict=False)
    return next((group for group, (a, b) in enumerate(pairs) if a != b), None)
