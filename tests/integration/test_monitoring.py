"""The dashboard and the alert rules read metrics that daemons have."""

import re

import pytest

from psserver.edge.metrics import TABLES
from pswire.metric_rows import Kind, Metric
from tests.integration.monitoring_files import panels, rules, selectors

SUFFIXES = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
OF_TARGETS = {"job", "instance"}
"""Labels that Prometheus gives to all series of a target."""


def known() -> dict[str, Metric[object]]:
    rows = [row for table in TABLES.values() for row in table]
    return {
        row.name + suffix: row
        for row in rows
        for suffix in SUFFIXES.get(row.kind, ("",))
    }


@pytest.mark.parametrize(
    "expression",
    [*(expression for _, expression in panels()), *(rule["expr"] for rule in rules())],
)
def test_expressions_read_metrics_that_there_are(expression: str) -> None:
    found = selectors(expression)
    assert found
    for selector in found:
        name, _, labels = selector.partition("{")
        if name.startswith("process_"):
            continue
        row = known()[name]
        asked = set(re.findall(r"(\w+)=", labels)) - OF_TARGETS
        assert asked <= set(row.labels)
        is_rate = re.search(rf"(?:rate|increase)\({name}\b", expression) is not None
        assert is_rate == (row.kind is not Kind.GAUGE), "a counter is read by its rate"


def test_no_label_of_ours_is_one_of_targets() -> None:
    """Prometheus would rename it to `exported_job`."""
    clashing = {name for name, row in known().items() if OF_TARGETS & set(row.labels)}
    assert clashing == set()
