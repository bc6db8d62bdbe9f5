"""`psctl bench step`, `large` and `overlap`: workloads with a command of their own.

Contenders take turns within one run, so that whatever else the machine does slows all
of them alike.
"""

import json
import re
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
from psctl.failures import CommandError
from psctl.folders import scratch_folder
from psctl.processes import Children, signals_interrupt

SCHEMA_VERSION: Final = 1

_MIB: Final = 1 << 20
_LARGE_TIMEOUT_S: Final = 1800.0


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


def bench_large(mebibyte_count: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Has one shard with Adam written, and another process read it."""
    figures: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "benchmark": "large"}
    with (
        signals_interrupt(),
        scratch_folder("paramserver-bench-") as scratch,
        Children(scratch) as children,
    ):
        folder = scratch / "checkpoints"
        folder.mkdir()
        for what, *arguments in (("write", str(mebibyte_count)), ("read",)):
            say(f"{what}: {mebibyte_count} MiB, and their state")
            command = ("psserver.bench.checkpoint", what, str(folder), *arguments)
            children.start(what, command)
            found = children.line_of(what, _LARGE_TIMEOUT_S, re.compile(r"\{.*\}"))
            if found is None:
                raise CommandError(f"it took more than {_LARGE_TIMEOUT_S:.0f} s")
            children.wait_ended(what, _LARGE_TIMEOUT_S)
            figures[what] = json.loads(found.group())
    if figures["read"]["digest"] != figures["write"]["digest"]:
        raise CommandError("what was read is not what was written, which is a bug")
    return {
        **figures,
        "mebibyte_count": mebibyte_count,
        "machine": machine(),
        "versions": versions(),
    }


def large_text(figures: Mapping[str, Any]) -> str:
    written, read = figures["write"], figures["read"]
    mebibyte_count = written["byte_count"] / _MIB

    def took(what: str, seconds: float) -> str:
        rate = mebibyte_count / seconds
        return f"{what} in {seconds:.1f} s ({rate:.0f} MiB/s)"

    return (
        f"{figures['mebibyte_count']} MiB with Adam, a checkpoint of "
        f"{mebibyte_count:.0f} MiB: {took('copied', written['copied_s'])}, "
        f"{took('written and synced', written['written_s'])}, "
        f"{took('read', read['read_s'])}, bit for bit; reading took "
        f"{read['beyond_byte_count'] / _MIB:.0f} MiB beside the shard's own "
        f"{read['own_byte_count'] / _MIB:.0f} MiB\n{machine_text()}"
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
