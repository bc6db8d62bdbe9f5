"""`psctl bench overlap`: a training step with and without `prepare(overlap=True)`.

Three contenders take turns of a few steps each within one run: one process with plain
torch, a job without overlap, a job with it. So whatever else the machine does meets all
of them. Daemons and a second worker are processes of their own.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

import psworker
from psctl.bench.machine import (
    Spread,
    free_port,
    machine,
    spread,
    spread_text,
    versions,
)
from psctl.bench.overlap_training import Training
from psctl.daemons import ShardPlace, start_daemons
from psctl.failures import CommandError
from psctl.folders import scratch_folder
from psctl.processes import Children, signals_interrupt
from pswire.addresses import Address

SCHEMA_VERSION: Final = 1

_WARM_UP_COUNT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSettings:
    """What to measure.

    Attributes:
        parameter_count: About how many parameters.
        batch_size: Samples of a worker's step.
        worker_count: 1 or 2.
        shard_count: Shards of each job.
        turn_count: Measured turns of each contender.
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
    settings: OverlapSettings, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measures all three; the figures.

    Raises:
        CommandError: A process failed, or the jobs computed different values.
    """
    torch.set_num_threads(settings.thread_count)
    with ExitStack() as stack:
        stack.enter_context(signals_interrupt())
        scratch = stack.enter_context(scratch_folder("paramserver-bench-"))
        children = stack.enter_context(Children(scratch))
        contenders = _contenders(stack, children, scratch, settings)
        alone, plain, overlapped = contenders
        progress(
            f"{alone.parameter_count:,} parameters, {settings.worker_count} workers x "
            f"{settings.shard_count} shards, {settings.turn_count} turns of "
            f"{settings.step_count} steps"
        )
        durations: list[list[float]] = [[] for _ in contenders]
        for turn in range(_WARM_UP_COUNT + settings.turn_count):
            took_s = [each.turn(settings.step_count) for each in contenders]
            children.check()
            if turn >= _WARM_UP_COUNT:
                for kept, seconds in zip(durations, took_s, strict=True):
                    kept.append(seconds)
                told = ", ".join(f"{1000 * seconds:.0f}" for seconds in took_s)
                progress(f"ms for one process, without and with overlap: {told}")
        if not all(map(torch.equal, plain.values(), overlapped.values())):
            raise CommandError("overlap has changed the values, which is a bug")
        return _figures(settings, alone.parameter_count, list(map(spread, durations)))


def _figures(
    settings: OverlapSettings, parameter_count: int, spreads: list[Spread]
) -> dict[str, Any]:
    """As `docs/psctl.md` has them: of a step, medians over turns."""
    alone, without, with_it = spreads
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "overlap",
        **asdict(settings),
        "parameter_count": parameter_count,
        "thread_count": torch.get_num_threads(),
        "machine": machine(),
        "versions": versions(),
        "one_process": alone,
        "without_overlap": without,
        "with_overlap": with_it,
        "without_over_with": _ratio(without, with_it),
        "with_over_one_process": _ratio(with_it, alone),
        "without_over_one_process": _ratio(without, alone),
    }


def _ratio(first: Spread, second: Spread) -> float:
    return round(first["median_ms"] / second["median_ms"], 3)


def _contenders(
    stack: ExitStack, children: Children, scratch: Path, settings: OverlapSettings
) -> tuple[Training, Training, Training]:
    """One process, a job without overlap and one with it, all at their first step."""
    sizes = settings.parameter_count, settings.batch_size
    addresses = [
        _start_job(children, scratch, name, settings)
        for name in ("plain", "overlapped")
    ]
    if settings.worker_count == 2:
        counts = {
            "parameters": settings.parameter_count,
            "batch": settings.batch_size,
            "turns": _WARM_UP_COUNT + settings.turn_count,
            "steps": settings.step_count,
            "threads": settings.thread_count,
        }
        children.start(
            "worker 1",
            [
                "psctl.bench.overlap_training",
                json.dumps(counts),
                *map(str, addresses),
            ],
            {},
        )
    jobs = []
    for address, overlap in zip(addresses, (False, True), strict=True):
        ps = stack.enter_context(psworker.connect(str(address), "w0"))
        training = Training(*sizes)
        training.prepare(ps, overlap=overlap)
        jobs.append(training)
    return Training(*sizes), jobs[0], jobs[1]


def _start_job(
    children: Children, scratch: Path, name: str, settings: OverlapSettings
) -> Address:
    folder = scratch / name
    folder.mkdir()
    places = []
    for index in range(settings.shard_count if settings.bandwidth_mbit else 0):
        listened, advertised = free_port(), free_port()
        bytes_per_s = settings.bandwidth_mbit * 125_000 / settings.shard_count
        children.start(
            f"{name} link {index}",
            [
                "psctl.bench.slow_link",
                str(advertised),
                str(listened),
                str(bytes_per_s),
                str(settings.latency_ms / 1000),
            ],
            {},
        )
        places.append(ShardPlace(f"127.0.0.1:{listened}", f"127.0.0.1:{advertised}"))
    return start_daemons(
        children,
        folder,
        shard_count=settings.shard_count,
        worker_count=settings.worker_count,
        prefix=f"{name} ",
        places=places,
    )


def overlap_text(figures: Mapping[str, Any]) -> str:
    """The figures for people."""
    link = "TCP on loopback"
    if figures["bandwidth_mbit"]:
        link = (
            f"a link of {figures['bandwidth_mbit']:g} Mbit/s and "
            f"{figures['latency_ms']:g} ms each way"
        )
    lines = [
        f"a step of {figures['parameter_count']:,} parameters, batch "
        f"{figures['batch_size']}, {figures['worker_count']} workers x "
        f"{figures['shard_count']} shards, {link}",
        f"{figures['machine']['cpu_model']}, "
        f"{figures['machine']['usable_core_count']} cores, torch on "
        f"{figures['thread_count']} of them",
        "",
        spread_text(
            {
                "one process": figures["one_process"],
                "overlap=False": figures["without_overlap"],
                "overlap=True": figures["with_overlap"],
            }
        ),
        "",
        f"overlap=False / overlap=True: {figures['without_over_with']:.2f}",
        f"overlap=True / one process: {figures['with_over_one_process']:.2f}",
    ]
    return "\n".join(lines)
