"""The table of workloads, and the table as people and programs read it."""

from collections.abc import Sequence
from typing import Final

from psctl.bench.workload import Entry, Workload, rate_at_least
from psctl.bench.workloads.big_parameter import (
    ALLREDUCE_2,
    ALLREDUCE_4,
    EXCHANGE,
    LINK,
    ONE_HOST,
    SHARDS,
    STEP,
)
from psctl.bench.workloads.checkpoints import (
    READERS,
    RECOVERY,
    RESTORE,
    SAVE,
    SAVING,
)
from psctl.bench.workloads.checks import CHECKS, CHECKS_ON_ONE_HOST
from psctl.bench.workloads.protected import SECURE_EXCHANGE, SECURE_SMALL
from psctl.bench.workloads.small_model import RATE, SMALL
from psctl.bench.workloads.training import DDP, OVERLAP

# The shard's arithmetic alone. psserver measures it: the two sides never import.
_APPLY: Final = Workload(
    name="apply",
    about_s=5,
    title="Adam on one big vector in a shard's process, without any transport",
    entries=(
        Entry("shard", "the shard's apply, chunk by chunk"),
        Entry("fused", "torch.optim.Adam(fused=True) at once"),
    ),
    targets=(rate_at_least("shard", 0.6, "fused"),),
    member_module="psserver.bench.apply",
)

WORKLOADS: Final[tuple[Workload, ...]] = (
    EXCHANGE,
    SHARDS,
    ONE_HOST,
    ALLREDUCE_2,
    ALLREDUCE_4,
    DDP,
    _APPLY,
    SMALL,
    RATE,
    SECURE_EXCHANGE,
    SECURE_SMALL,
    CHECKS,
    CHECKS_ON_ONE_HOST,
    LINK,
    SAVE,
    RESTORE,
    SAVING,
    READERS,
    RECOVERY,
)
"""Of `psctl bench all`, in the order in which they are measured."""


def workload_named(name: str) -> Workload:
    """One of `psctl bench all`.

    Raises:
        ValueError: There is none; the text has the names there are.
    """
    for workload in WORKLOADS:
        if workload.name == name:
            return workload
    names = ", ".join(each.name for each in WORKLOADS)
    raise ValueError(f"there is no workload {name!r}; there are {names}")


def any_workload_named(name: str) -> Workload:
    """The workload of a name, also one that has a command of its own."""
    alone = {each.name: each for each in (STEP, OVERLAP)}
    return alone.get(name) or workload_named(name)


def workloads_text(workloads: Sequence[Workload]) -> str:
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
