"""On what a figure was measured."""

import os
import platform
import socket
from importlib import metadata
from pathlib import Path

from psworker.launch.cores import usable_core_count


def machine() -> dict[str, object]:
    """The machine, without its name."""
    return {
        "cpu_model": _cpu_model(),
        "core_count": os.cpu_count(),
        "usable_core_count": usable_core_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_text() -> str:
    return f"{_cpu_model()}, {usable_core_count()} cores"


def versions() -> dict[str, str]:
    packages = ("paramserver", "torch", "grpcio")
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
