"""What one step of a job crosses, seen by a profiler in every thread."""

import sys
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn

import psworker
from tests.integration.job import Job

STEPS_BEFORE: Final = 3
"""Steps before the one that is looked at: first ones make what later ones have."""

STEPS_LOOKED_AT: Final = 5
"""The smallest of them counts: what the coordinator does now and then, and a shard
reports to it, is of no step, and falls into some."""

PACKAGES: Final = ("psworker", "psserver", "pswire")


@dataclass(slots=True)
class Crossing:
    """Functions that were called, and how often the next one was of another module.

    Attributes:
        functions: Of each module.
        move_count: Calls from a module into another one, in all threads.
    """

    functions: dict[str, set[CodeType]] = field(
        default_factory=lambda: defaultdict(set)
    )
    move_count: int = 0

    def module_count(self, package: str = "") -> int:
        """Modules of a package, or of all."""
        return len(self._of(package))

    def function_count(self, package: str = "") -> int:
        """Functions of a package, or of all."""
        return sum(len(self.functions[each]) for each in self._of(package))

    def _of(self, package: str) -> list[str]:
        return [
            each for each in self.functions if _package(each) == package or not package
        ]


class _Profiler:
    def __init__(self) -> None:
        self.is_on = False
        self.crossing = Crossing()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:  # noqa: ANN401
        if not self.is_on or event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if _package(module) not in PACKAGES or "_pb2" in module:
            return
        self.crossing.functions[module].add(frame.f_code)
        caller = frame.f_back
        while caller is not None:
            above = caller.f_globals.get("__name__", "")
            if _package(above) in PACKAGES:
                self.crossing.move_count += above != module
                return
            caller = caller.f_back


def crossing_of_a_step() -> Crossing:
    """Runs a job of one worker and one shard, and looks at one of its steps.

    Returns:
        Of some steps the one that crosses the fewest modules.
    """
    crossings = []
    profiler = _Profiler()
    threading.setprofile(profiler)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Job(Path(folder), shard_count=1, sockets=True) as job,
            psworker.connect(job.address, worker_id="w0") as ps,
        ):
            model: Any = nn.Linear(4, 2)
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1)
            )
            for _ in range(STEPS_BEFORE):
                _step(model, optimizer)
            for _ in range(STEPS_LOOKED_AT):
                profiler.crossing = Crossing()
                profiler.is_on = True
                sys.setprofile(profiler)
                _step(model, optimizer)
                sys.setprofile(None)
                profiler.is_on = False
                crossings.append(profiler.crossing)
    finally:
        threading.setprofile(None)
    return min(crossings, key=Crossing.module_count)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def _package(module: str) -> str:
    return module.partition(".")[0]
