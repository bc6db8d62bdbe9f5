"""On what a figure was measured."""

import os
import platform
import socket
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypedDict

from psworker.launch.cores import usable_core_count


class Spread(TypedDict):
    """Durations of one thing, repeated."""

    median_ms: float
    min_ms: float
    max_ms: float
    interquartile_ms: float


def machine() -> dict[str, object]:
    """The machine, without its name."""
    return {
        "cpu_model": _cpu_model(),
        "core_count": os.cpu_count(),
        "usable_core_count": usable_core_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def versions() -> dict[str, str]:
    """What is installed."""
    packages = ("paramserver", "torch", "grpcio")
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def spread(durations_s: Sequence[float]) -> Spread:
    """Sums up at least two durations."""
    in_ms = [1000 * each for each in durations_s]
    first, median, third = statistics.quantiles(in_ms, n=4, method="inclusive")
    return Spread(
        median_ms=round(median, 3),
        min_ms=round(min(in_ms), 3),
        max_ms=round(max(in_ms), 3),
        interquartile_ms=round(third - first, 3),
    )


def spread_text(spreads: Mapping[str, Spread]) -> str:
    """Spreads under each other, for people."""
    lines = [f"{'':24}{'median':>10}{'min':>10}{'max':>10}{'IQR':>10}  ms"]
    for name, of in spreads.items():
        numbers = of["median_ms"], of["min_ms"], of["max_ms"], of["interquartile_ms"]
        lines.append(f"{name:24}" + "".join(f"{each:10.1f}" for each in numbers))
    return "\n".join(lines)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
