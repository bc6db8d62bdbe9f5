"""`psctl bench overlap`: a training step with and without `prepare(overlap=True)`.

Three contenders take turns of a few steps each within one run: one process with plain
torch, a job without overlap, a job with it. So whatever else the machine does slows all
of them alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from psctl.bench.figures import Spread
from psctl.bench.machine import machine, machine_text, versions
from psctl.bench.measuring import measure_alone
from psctl.bench.report import spread_table
from psctl.bench.workload import Sizes
from psctl.bench.workloads.training import overlap_of, parameter_count

SCHEMA_VERSION: Final = 1


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
    """Measures all three; the figures of a step, as `docs/psctl.md` has them.

    Raises:
        CommandError: A process failed, or the jobs computed different values.
    """
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
    link = "TCP on loopback"
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
