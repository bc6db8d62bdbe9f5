"""Whose hyperparameters a clock uses, and who carries others."""

from collections.abc import Mapping

from psserver.edge.push import Trailer
from psserver.edge.record import Member, WorkerKey
from psserver.shard.core.clock_table import ClockTable
from psserver.shard.core.effects import DeclarationsDiffer, HyperparametersDiffer

Trailers = Mapping[WorkerKey, Trailer]


def source_of(contributors: tuple[Member, ...], trailers: Trailers) -> WorkerKey:
    """Whose hyperparameters count: the longest contributor that has weight."""
    weighty = tuple(m for m in contributors if trailers[m.worker].weight > 0)
    return ClockTable.longest(weighty or contributors).worker


class HyperparameterComparison:
    """Names each pair of workers that differ once."""

    def __init__(self) -> None:
        self._warned: set[tuple[WorkerKey, WorkerKey]] = set()
        self._told: set[tuple[WorkerKey, WorkerKey]] = set()

    def differences(
        self, clock: int, used: WorkerKey, trailers: Trailers
    ) -> list[HyperparametersDiffer | DeclarationsDiffer]:
        """Workers with weight whose values differ from those used, not yet named."""
        found: list[HyperparametersDiffer | DeclarationsDiffer] = []
        for other, trailer in trailers.items():
            if trailer.weight == 0 or (used, other) in self._warned:
                continue
            if trailer.spec_digest != trailers[used].spec_digest:
                if (used, other) not in self._told:
                    self._told.add((used, other))
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
            self._warned.add((used, other))
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
