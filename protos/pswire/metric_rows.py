"""Metrics for Prometheus as rows of a table, which read what a process knows.

Nothing is kept here: a row reads when somebody asks. Names are as Prometheus wants
them: `ps_` first, base units, `_total` after what only grows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, TypeAlias, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

Source = TypeVar("Source")
Labelled: TypeAlias = "Iterable[tuple[tuple[object, ...], float | None]]"
"""Values of labels, each with that of the metric."""


class Kind(StrEnum):
    GAUGE = "gauge"
    """What goes up and down."""

    COUNTER = "counter"
    """What only grows until the daemon is started again."""

    HISTOGRAM = "histogram"
    """How often each whole number was counted."""


@dataclass(frozen=True, slots=True)
class Metric(Generic[Source]):
    """A row of a table.

    Attributes:
        name: In Prometheus.
        help: One sentence.
        read: Finds its value; None for one that isn't known now. One with labels finds
            pairs of their values and its own, a histogram counts by number.
        labels: Their names.
        is_histogram: Whether it is one.
    """

    name: str
    help: str
    read: Callable[[Source], Any]
    labels: tuple[str, ...] = ()
    is_histogram: bool = False

    @property
    def kind(self) -> Kind:
        """What may become of its values, which its name says."""
        if self.is_histogram:
            return Kind.HISTOGRAM
        return Kind.COUNTER if self.name.endswith("_total") else Kind.GAUGE

    def family(self, source: Source) -> Family:
        """Its values, as Prometheus' client takes them."""
        found = self.read(source)
        if self.kind is Kind.HISTOGRAM:
            return _histogram(self, found)
        made = GaugeMetricFamily if self.kind is Kind.GAUGE else CounterMetricFamily
        family: GaugeMetricFamily | CounterMetricFamily = made(
            self.name, self.help, labels=self.labels
        )
        for labels, value in found if self.labels else [((), found)]:
            if value is not None:
                family.add_metric([str(each) for each in labels], value)
        return family


STALENESS_BOUNDS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 62)
"""Of the buckets of staleness; above it is counted as one."""


def _histogram(metric: Metric[Any], counts: Sequence[int]) -> Family:
    """A histogram of whole numbers: position is the number, the last is open above.

    Its sum is the least that it can be, for those that are counted as the last.
    """
    family = HistogramMetricFamily(metric.name, metric.help)
    buckets = [
        (str(float(bound)), float(sum(counts[: bound + 1])))
        for bound in STALENESS_BOUNDS
    ]
    total = sum(number * count for number, count in enumerate(counts))
    family.add_metric([], [*buckets, ("+Inf", float(sum(counts)))], float(total))
    return family


class Rows(Collector, Generic[Source]):
    """The rows of a table, read from one source when somebody asks."""

    def __init__(
        self, table: Sequence[Metric[Source]], source: Callable[[], Source | None]
    ) -> None:
        """Reads nothing yet.

        Args:
            table: The rows.
            source: Finds what they read; None while there is nothing.
        """
        self._table = table
        self._source = source

    @override
    def collect(self) -> Iterable[Family]:
        source = self._source()
        if source is not None:
            yield from (metric.family(source) for metric in self._table)

    def describe(self) -> Iterable[Family]:
        """Nothing, so that no value is read when it is registered."""
        return ()
