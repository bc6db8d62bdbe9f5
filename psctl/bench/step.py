"""`psctl bench step`: push, apply and pull of one big parameter, beside torch's RPC.

One worker, one shard, one host, SGD without momentum. Both sides are measured in turn
within one run, so that whatever else the machine does slows both alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from psctl.bench.machine import machine, machine_text, versions
from psctl.bench.measuring import measure_alone
from psctl.bench.report import spread_table
from psctl.bench.workload import Sizes
from psctl.bench.workloads.big_parameter import STEP

SCHEMA_VERSION: Final = 1


def bench_step(
    mebibyte_count: int, repetition_count: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measures both; the figures, as `docs/psctl.md` has them.

    Raises:
        CommandError: A process failed, or the two computed different values.
    """
    sizes = Sizes(mebibyte_count=mebibyte_count, repetition_count=repetition_count)
    say(
        f"{mebibyte_count} MiB each way, {repetition_count} repetitions of each in turn"
    )
    spreads = measure_alone(STEP, sizes)
    ours, theirs = spreads["paramserver"], spreads["torch_rpc"]
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "step",
        "mebibyte_count": mebibyte_count,
        "repetition_count": repetition_count,
        "thread_count": torch.get_num_threads(),
        "machine": machine(),
        "versions": versions(),
        **spreads,
        "torch_rpc_over_paramserver": round(theirs["median_ms"] / ours["median_ms"], 3),
    }


def step_text(figures: Mapping[str, Any]) -> str:
    table = spread_table(
        {
            "paramserver": figures["paramserver"],
            "torch.distributed.rpc": figures["torch_rpc"],
        }
    )
    return (
        f"push + apply + pull of {figures['mebibyte_count']} MiB, 1 worker, 1 shard, "
        f"one host\n{machine_text()}\n\n{table}\n\n"
        f"rpc / paramserver: {figures['torch_rpc_over_paramserver']:.2f}"
    )
