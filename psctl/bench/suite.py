"""The table of workloads, and the table as people and programs read it."""

from collections.abc import Sequence
from typing import Final

from psctl.bench.workload import Workload
from psctl.bench.workloads.allreduce import ALLREDUCE_2, ALLREDUCE_4
from psctl.bench.workloads.apply import APPLY
from psctl.bench.workloads.checks import CHECKS, CHECKS_ON_ONE_HOST
from psctl.bench.workloads.ddp import DDP
from psctl.bench.workloads.exchange import EXCHANGE
from psctl.bench.workloads.link import LINK
from psctl.bench.workloads.one_host import ONE_HOST
from psctl.bench.workloads.rate import RATE
from psctl.bench.workloads.shards import SHARDS
from psctl.bench.workloads.small import SMALL

WORKLOADS: Final[tuple[Workload, ...]] = (
    EXCHANGE,
    SHARDS,
    ONE_HOST,
    ALLREDUCE_2,
    ALLREDUCE_4,
    DDP,
    APPLY,
    SMALL,
    RATE,
    CHECKS,
    CHECKS_ON_ONE_HOST,
    LINK,
)
"""In the order in which they are measured."""


def workload_named(name: str) -> Workload:
    """The workload of a name.

    Raises:
        ValueError: There is none; the text has the names there are.
    """
    for workload in WORKLOADS:
        if workload.name == name:
            return workload
    names = ", ".join(each.name for each in WORKLOADS)
    raise ValueError(f"there is no workload {name!r}; there are {names}")


def workloads_text(workloads: Sequence[Workload]) -> str:
    """The table for people."""
    parts = []
    for workload in workloads:
        lines = [f"{workload.name} (about {workload.about_s} s): {workload.title}"]
        lines += [f"    {entry.name}: {entry.text}" for entry in workload.entries]
        lines += [f"    target: {target.text}" for target in workload.targets]
        parts.append("\n".join(lines))
    minutes = sum(workload.about_s for workload in workloads) / 60
    parts.append(
        f"All together take about {minutes:.0f} minutes on two cores, with the default "
        "sizes and repetitions."
    )
    return "\n\n".join(parts)


def workloads_json(workloads: Sequence[Workload]) -> dict[str, object]:
    """The table for programs."""
    return {
        "schema_version": 1,
        "workloads": [
            {
                "name": workload.name,
                "title": workload.title,
                "about_s": workload.about_s,
                "contenders": [
                    {"name": entry.name, "text": entry.text}
                    for entry in workload.entries
                ],
                "targets": [target.text for target in workload.targets],
            }
            for workload in workloads
        ],
    }
