"""What `psworker run` starts: how often, in which environment, on which devices."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psworker.launch.cores import THREADS_VARIABLE, core_share
from psworker.launch.launched import COUNT_VARIABLE, GROUP_VARIABLE, INDEX_VARIABLE
from psworker.launch.torchrun import RUN_ID_VARIABLE

_DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"

_UNCOUNTED_DEVICES: Final = ("dxg", "kfd", "nvhost-ctrl-gpu", "nvgpu")
"""Beside these (WSL, ROCm, Jetson) GPUs have no file of their own."""

RESTART_DELAY_S: Final = 1.0
RESTART_DELAY_MAX_S: Final = 30.0
STEADY_S: Final = 60.0
"""After so long a process has not failed at its start: the next delay is the shortest
again."""


class DeviceError(ValueError):
    """The devices that a user names can't be handed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What to start.

    Attributes:
        command: Arguments of Python: a script or `-m` and a module, then its own.
        coordinator: `HOST:PORT`.
        process_count: Processes to start on this machine.
        restart_limit: How often each process that failed is started again.
        worker_id: Id of the worker; with several processes, what their ids begin
            with. None to have the coordinator choose.
        devices: CUDA devices to hand out: one to a process and round again, all to a
            process that is alone. None to leave them as they are.
        history: Where workers write their histories; empty for what they inherit.
        host_group: Names the group whose processes are one worker; empty where each
            is one.
    """

    command: tuple[str, ...]
    coordinator: str
    process_count: int = 1
    restart_limit: int = 0
    worker_id: str | None = None
    devices: tuple[str, ...] | None = None
    history: str = ""
    host_group: str = ""

    @property
    def script(self) -> str:
        """The script or module, as a person would call it."""
        return self.command[1] if self.command[0] == "-m" else self.command[0]

    def worker_id_of(self, index: int) -> str | None:
        """Id of the worker in process `index`, None if the coordinator chooses it."""
        if self.worker_id is None or self.process_count == 1 or self.host_group:
            return self.worker_id
        return f"{self.worker_id}-{index}"

    def devices_of(self, index: int) -> str | None:
        """What process `index` may see, None for what it inherits."""
        if self.devices is None:
            return None
        if not self.devices or self.process_count == 1:
            return ",".join(self.devices)
        return self.devices[index % len(self.devices)]

    def environment(self, index: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Environment of process `index`, the same for each of its starts."""
        environment = dict(inherited)
        environment["PS_COORDINATOR"] = self.coordinator
        environment[INDEX_VARIABLE] = str(index)
        environment[COUNT_VARIABLE] = str(self.process_count)
        environment.pop("PS_WORKER_ID", None)
        environment.pop(GROUP_VARIABLE, None)
        # torchrun has started us, and not these: a rank is no longer theirs.
        environment.pop(RUN_ID_VARIABLE, None)
        if self.host_group and self.process_count > 1:
            environment[GROUP_VARIABLE] = self.host_group
        if self.history:
            environment["PS_HISTORY"] = self.history
        worker_id = self.worker_id_of(index)
        if worker_id is not None:
            environment["PS_WORKER_ID"] = worker_id
        devices = self.devices_of(index)
        if devices is not None:
            environment[_DEVICES_VARIABLE] = devices
        if self.process_count > 1:
            # Output goes through a pipe, which Python would fill before it shows.
            environment.setdefault("PYTHONUNBUFFERED", "1")
            threads = core_share(self.process_count)
            environment.setdefault(THREADS_VARIABLE, str(threads))
        return environment


def restart_delay_s(quick_failure_count: int) -> float:
    """How long to wait before the next start, after so many quick failures in a row."""
    doublings = min(max(0, quick_failure_count - 1), 10)
    return float(min(RESTART_DELAY_S * 2**doublings, RESTART_DELAY_MAX_S))


def devices_of_choice(
    choice: str,
    *,
    process_count: int,
    environment: Mapping[str, str],
    device_folder: Path = Path("/dev"),
) -> tuple[str, ...] | None:
    """The devices that `--gpus` stands for; None to leave them as they are.

    Args:
        choice: `auto`, `none`, or names with commas between.
        process_count: Processes that share them.
        environment: Where `CUDA_VISIBLE_DEVICES` may be set, which holds.
        device_folder: Where the machine's devices are.

    Raises:
        DeviceError: It is none of these, or names what the environment forbids or
            what the machine does not have.
    """
    if choice == "none":
        return ()
    visible = visible_cuda_devices(environment, device_folder)
    if choice == "auto":
        return visible if process_count > 1 and visible else None
    named = tuple(name.strip() for name in choice.split(","))
    if not all(named) or len(set(named)) < len(named):
        raise DeviceError(
            f"{choice!r} is no list of GPUs: give auto, none, or names that differ, as "
            "in 0,1"
        )
    allowed = environment.get(_DEVICES_VARIABLE)
    missing = [name for name in named if name not in visible]
    if allowed is not None and missing:
        raise DeviceError(
            f"{_DEVICES_VARIABLE}={allowed} hides GPU {', '.join(missing)}: name those "
            "that it has, or unset it"
        )
    if allowed is None and _lists_all(device_folder):
        _refuse_missing([name for name in missing if not _is_lasting(name)], visible)
    return named


def _is_lasting(name: str) -> bool:
    """Whether it names one device for ever, which only the driver can look up."""
    return name.startswith(("GPU-", "MIG-"))


def _lists_all(device_folder: Path) -> bool:
    """Whether a GPU of this machine has a file there, by which it can be counted."""
    return sys.platform == "linux" and not any(
        (device_folder / name).exists() for name in _UNCOUNTED_DEVICES
    )


def _refuse_missing(missing: Sequence[str], visible: Sequence[str]) -> None:
    if not missing:
        return
    names = ", ".join(map(repr, missing))
    if not visible:
        raise DeviceError(
            f"this machine has no GPU, so none is named {names}: leave --gpus out, or "
            "say --gpus none"
        )
    raise DeviceError(
        f"no GPU of this machine is named {names}: it has {', '.join(visible)}"
    )


def visible_cuda_devices(
    environment: Mapping[str, str], device_folder: Path = Path("/dev")
) -> tuple[str, ...]:
    """CUDA devices of this machine that a process may use, without loading CUDA."""
    chosen = environment.get(_DEVICES_VARIABLE)
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip())
    # A container may hold only /dev/nvidia3, which CUDA there still calls 0.
    return tuple(
        str(index) for index, _ in enumerate(device_folder.glob("nvidia[0-9]*"))
    )
