"""What a workload has to show, from the durations of its repetitions. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from psctl.bench.workload import Target, Workload


class Spread(TypedDict):
    """Durations of one thing, repeated."""

    median_ms: float
    min_ms: float
    max_ms: float
    interquartile_ms: float


def spread(durations_s: Sequence[float]) -> Spread:
    """Sums up at least two durations."""
    in_ms = [1000 * each for each in durations_s]
    first, median, third = statistics.quantiles(in_ms, n=4, method="inclusive")
    return Spread(
        median_ms=round(median, 3),
        min_ms=round(min(in_ms), 3),
        max_ms=round(max(in_ms), 3),
        interquartile_ms=round(third - first, 3),
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """Whether a target was met.

    Attributes:
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
        if self.measured is None:
            return None
        if self.target.is_rate:
            return self.measured >= self.target.limit
        return self.measured <= self.target.limit

    @property
    def share_of_limit(self) -> float | None:
        """The ratio in limits, turned such that up to 1 is good."""
        if self.measured is None:
            return None
        share = self.measured / self.target.limit
        return 1 / share if self.target.is_rate else share


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFigures:
    """All that was measured of a workload.

    Attributes:
        durations_s: By contender, time of one thing in each repetition, in order.
        cannot: By contender that could not run, why.
        failure: Why nothing was measured, else empty.
        took_s: Time of the whole workload, with its start.
        link: How the link between workers and shards was limited, else empty.
    """

    workload: Workload
    durations_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    cannot: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    took_s: float = 0.0
    link: str = ""

    @property
    def ratios(self) -> list[Ratio]:
        return [self._ratio(target) for target in self.workload.targets]

    def spread_of(self, contender: str) -> Spread | None:
        """Of a contender, `None` if it was not measured."""
        durations = self.durations_s.get(contender)
        return spread(durations) if durations else None

    def why_not(self, contender: str) -> str:
        """Why a contender was not measured; empty if it was."""
        if self.durations_s.get(contender):
            return ""
        return self.cannot.get(contender) or self.failure or "it was not measured"

    def _ratio(self, target: Target) -> Ratio:
        for name in (target.contender, target.baseline):
            if reason := self.why_not(name):
                return Ratio(target, None, why_not=f"{name}: {reason}")
        first = self.durations_s[target.contender]
        second = self.durations_s[target.baseline]
        if target.is_rate:
            first, second = second, first
        low, _, high = statistics.quantiles(
            [one / other for one, other in zip(first, second, strict=True)],
            n=4,
            method="inclusive",
        )
        ratio = statistics.median(first) / statistics.median(second)
        return Ratio(target, ratio, low=low, high=high)


def slowest(durations_s: Sequence[Sequence[float]]) -> list[float]:
    """Of each repetition, the longest time of the members' lists."""
    return [max(of_all) for of_all in zip(*durations_s, strict=True)]


def turn_order(names: Sequence[str], repetition: int) -> list[str]:
    """Contenders in the order of a repetition: each is first equally often.

    The one that follows finds caches and threads still warm, or in its way.
    """
    start = repetition % len(names)
    return [*names[start:], *names[:start]]
