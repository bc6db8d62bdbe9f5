"""`psctl bench step` and `psctl bench overlap`: workloads with a command of their own.

Contenders take turns within one run, so that whatever else the machine does slows all
of them alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from psctl.bench.command import measure_alone
from psctl.bench.figures import Spread
from psctl.bench.machine import machine, machine_text, versions
from psctl.bench.report import spread_table
from psctl.bench.workload import Sizes
from psctl.bench.workloads.big_parameter import STEP
from psctl.bench.workloads.training import overlap_of, parameter_count

SCHEMA_VERSION: Final = 1


def bench_step(
    mebibyte_count: int, repetition_count: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measures a step of one big parameter on both sides, as `docs/psctl.md` says."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSettings:
    """What to measure.

    Attributes:
        parameter_count: About how many parameters.
        batch_size: Samples of a worker's step.
        step_count: Steps of a turn.
        bandwidth_mbit: Speed of a worker's link in each direction, 0 for loopback.
        latency_ms: One way, with a bandwidth only.
        thread_count: Of torch in each worker.
    """

    parameter_count: int
    batch_size: int
    worker_count: int
    shard_count: int
    turn_count: int
    step_count: int
    bandwidth_mbit: float
    latency_ms: float
    thread_count: int


def bench_overlap(
    settings: OverlapSettings, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measures all three; the figures of a step, as `docs/psctl.md` has them."""
    sizes = Sizes(
        parameter_count=settings.parameter_count,
        batch_size=settings.batch_size,
        call_count=settings.step_count,
        repetition_count=settings.turn_count,
    )
    workload = overlap_of(
        worker_count=settings.worker_count,
        shard_count=settings.shard_count,
        bandwidth_mbit=settings.bandwidth_mbit,
        latency_ms=settings.latency_ms,
        thread_count=settings.thread_count,
    )
    say(
        f"{parameter_count(sizes):,} parameters, {settings.worker_count} workers x "
        f"{settings.shard_count} shards, {settings.turn_count} turns of "
        f"{settings.step_count} steps"
    )
    spreads = measure_alone(workload, sizes)
    alone, without, with_it = spreads.values()
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "overlap",
        **asdict(settings),
        "parameter_count": parameter_count(sizes),
        "machine": machine(),
        "versions": versions(),
        **spreads,
        "without_over_with": _ratio(without, with_it),
        "with_over_one_process": _ratio(with_it, alone),
        "without_over_one_process": _ratio(without, alone),
    }


def _ratio(first: Spread, second: Spread) -> float:
    return round(first["median_ms"] / second["median_ms"], 3)


def overlap_text(figures: Mapping[str, Any]) -> str:
    link = "one machine"
    if figures["bandwidth_mbit"]:
        link = (
            f"a link of {figures['bandwidth_mbit']:g} Mbit/s and "
            f"{figures['latency_ms']:g} ms each way"
        )
    table = spread_table(
        {
            "one process": figures["one_process"],
            "overlap=False": figures["without_overlap"],
            "overlap=True": figures["with_overlap"],
        }
    )
    return (
        f"a step of {figures['parameter_count']:,} parameters, batch "
        f"{figures['batch_size']}, {figures['worker_count']} workers x "
        f"{figures['shard_count']} shards, {link}\n"
        f"{machine_text()}, torch on {figures['thread_count']} of them\n\n"
        f"{table}\n\n"
        f"overlap=False / overlap=True: {figures['without_over_with']:.2f}\n"
        f"overlap=True / one process: {figures['with_over_one_process']:.2f}"
    )
