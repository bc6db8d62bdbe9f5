"""The table of workloads, and the table as people and programs read it."""

from collections.abc import Sequence
from typing import Final

from psctl.bench.rpc_server import Transports
from psctl.bench.workload import Entry, Workload, begun_elsewhere, rate_at_least
from psctl.bench.workloads.big_parameter import (
    ALLREDUCE_2,
    ALLREDUCE_4,
    EXCHANGE,
    LINK,
    ONE_HOST,
    OURS,
    SHARDS,
    TORCH_RPC,
)
from psctl.bench.workloads.checks import CHECKS, CHECKS_ON_ONE_HOST
from psctl.bench.workloads.ddp import DDP
from psctl.bench.workloads.rpc_steps import start_rpc
from psctl.bench.workloads.small_model import RATE, SMALL

# The shard's arithmetic alone. psserver measures it: the two sides never import.
_APPLY: Final = Workload(
    name="apply",
    about_s=5,
    title="Adam on one big vector in a shard's process, without any transport",
    entries=(
        Entry("shard", "the shard's apply, chunk by chunk", begun_elsewhere),
        Entry("fused", "torch.optim.Adam(fused=True) at once", begun_elsewhere),
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
    CHECKS,
    CHECKS_ON_ONE_HOST,
    LINK,
)
"""In the order in which they are measured."""

STEP: Final = Workload(
    name="step",
    about_s=10,
    title="push + apply (SGD) + pull of one big parameter, 1 worker, 1 shard, one host",
    entries=(OURS, TORCH_RPC),
    targets=(),
    start=lambda ground: {
        "coordinator": ground.start_job(),
        "rpc": start_rpc(ground, Transports.TCP),
    },
)
"""What `psctl bench step` measures."""


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
