"""`psctl bench step`: push, apply and pull of one big parameter, beside torch's RPC.

One worker, one shard, one host, SGD without momentum. Both sides are measured in turn
within one run, so that whatever else the machine does meets both.
"""

from collections.abc import Callable
from typing import Final, TypedDict

import torch

from psctl.bench.machine import Spread, machine, spread, spread_text, versions
from psctl.bench.measuring import measure_workload
from psctl.bench.suite import STEP
from psctl.bench.workload import Sizes
from psctl.failures import CommandError
from psctl.folders import scratch_folder
from psctl.processes import signals_interrupt

SCHEMA_VERSION: Final = 1


class StepBench(TypedDict):
    """Figures of one run."""

    schema_version: int
    benchmark: str
    mebibyte_count: int
    repetition_count: int
    thread_count: int
    machine: dict[str, object]
    versions: dict[str, str]
    paramserver: Spread
    torch_rpc: Spread
    torch_rpc_over_paramserver: float


def bench_step(
    mebibyte_count: int, repetition_count: int, progress: Callable[[str], None]
) -> StepBench:
    """Measures both; the figures.

    Raises:
        CommandError: A process failed, or the two computed different values.
    """
    sizes = Sizes(mebibyte_count=mebibyte_count, repetition_count=repetition_count)
    progress(
        f"{mebibyte_count} MiB each way, {repetition_count} repetitions of each, "
        "in turn"
    )
    with signals_interrupt(), scratch_folder("paramserver-bench-") as scratch:
        measured = measure_workload(STEP, sizes, scratch)
    for name in ("paramserver", "torch_rpc"):
        if why := measured.why_not(name):
            raise CommandError(why)
    ours, theirs = (spread(each) for each in measured.durations_s.values())
    return StepBench(
        schema_version=SCHEMA_VERSION,
        benchmark="step",
        mebibyte_count=mebibyte_count,
        repetition_count=repetition_count,
        thread_count=torch.get_num_threads(),
        machine=machine(),
        versions=versions(),
        paramserver=ours,
        torch_rpc=theirs,
        torch_rpc_over_paramserver=round(theirs["median_ms"] / ours["median_ms"], 3),
    )


def bench_text(figures: StepBench) -> str:
    """The figures for people."""
    return "\n".join(
        [
            f"push + apply + pull of {figures['mebibyte_count']} MiB, 1 worker, "
            "1 shard, one host",
            f"{figures['machine']['cpu_model']}, "
            f"{figures['machine']['usable_core_count']} cores",
            "",
            spread_text(
                {
                    "paramserver": figures["paramserver"],
                    "torch.distributed.rpc": figures["torch_rpc"],
                }
            ),
            "",
            f"rpc / paramserver: {figures['torch_rpc_over_paramserver']:.2f}",
        ]
    )
