"""What a workload has to show, from the durations of its repetitions. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from psctl.bench.machine import Spread, spread
from psctl.bench.workload import Bound, Quantity, Target, Workload


@dataclass(frozen=True, slots=True)
class Ratio:
    """What became of a target.

    Attributes:
        target: What was wanted.
        measured: Ratio of the medians; `None` when one of them is missing.
        low: Lower quartile of the ratios of repetitions, each to its neighbour.
        high: Upper quartile of these.
        why_not: Why it was not measured, else empty.
    """

    target: Target
    measured: float | None
    low: float | None = None
    high: float | None = None
    why_not: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the ratio is on the good side; `None` when there is none."""
        if self.measured is None:
            return None
        if self.target.bound is Bound.AT_MOST:
            return self.measured <= self.target.limit
        return self.measured >= self.target.limit

    @property
    def share_of_limit(self) -> float | None:
        """The ratio in limits, turned such that up to 1 is good."""
        if self.measured is None:
            return None
        share = self.measured / self.target.limit
        return share if self.target.bound is Bound.AT_MOST else 1 / share


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFigures:
    """All that was measured of a workload.

    Attributes:
        workload: Which one.
        durations_s: By contender, time of one thing in each repetition, in order.
        cannot: By contender that could not run, why.
        failure: Why nothing was measured, else empty.
        took_s: Time of the whole workload, with its start.
        link: How the link between workers and shards was limited, empty for not at all.
    """

    workload: Workload
    durations_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    cannot: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    took_s: float = 0.0
    link: str = ""

    @property
    def ratios(self) -> list[Ratio]:
        """What became of each target."""
        return [self._ratio(target) for target in self.workload.targets]

    def spread_of(self, contender: str) -> Spread | None:
        """Median and spread of a contender, `None` if it was not measured."""
        durations = self.durations_s.get(contender)
        return spread(durations) if durations else None

    def rate_of(self, contender: str) -> float | None:
        """Things in a second, by the median."""
        durations = self.durations_s.get(contender)
        return 1 / statistics.median(durations) if durations else None

    def why_not(self, contender: str) -> str:
        """Why a contender was not measured; empty if it was."""
        if self.durations_s.get(contender):
            return ""
        return self.cannot.get(contender) or self.failure or "it was not measured"

    def _ratio(self, target: Target) -> Ratio:
        for name in (target.contender, target.baseline):
            reason = self.why_not(name)
            if reason:
                return Ratio(target, None, why_not=f"{name}: {reason}")
        first = self.durations_s[target.contender]
        second = self.durations_s[target.baseline]
        if target.quantity is Quantity.RATE:
            first, second = second, first
        low, _, high = statistics.quantiles(
            [one / other for one, other in zip(first, second, strict=True)],
            n=4,
            method="inclusive",
        )
        return Ratio(
            target,
            statistics.median(first) / statistics.median(second),
            low=low,
            high=high,
        )


def slowest(durations_s: Sequence[Sequence[float]]) -> list[float]:
    """Of each repetition the time of the member that took longest.

    Args:
        durations_s: By member, then by repetition.
    """
    return [max(of_all) for of_all in zip(*durations_s, strict=True)]


def turn_order(names: Sequence[str], repetition: int) -> list[str]:
    """Contenders in the order of a repetition: each comes first equally often.

    Who follows whom has its caches and threads still warm, or in its way.
    """
    start = repetition % len(names)
    return [*names[start:], *names[:start]]
