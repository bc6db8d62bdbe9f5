"""How far the demo is: what its workers have reported, counted."""

import json
import time
from dataclasses import dataclass, field
from typing import TypedDict

from psctl.failures import CommandError
from psworker.pace import duration_text


class StepReport(TypedDict):
    """One line of a worker: a step it has completed."""

    worker_id: str
    clock: int
    frontier: int
    epoch: int
    loss: float
    traffic_bytes: int
    indices: list[int]


def read_report(text: str) -> StepReport:
    """Reads a worker's line. CommandError: it's none."""
    try:
        report: StepReport = json.loads(text)
    except ValueError as error:
        raise CommandError(f"a worker printed {text[:200]!r}") from error
    return report


@dataclass(slots=True)
class Progress:
    """What the workers have reported.

    Attributes:
        epoch_count: Of the whole training.
        step_count: About how many steps those are; 0 where that is not known.
        batches: For each clock, each worker's samples.
        clocks: Newest clock of each worker.
        frontier: Newest clock that all workers have closed.
        epoch: Newest epoch that a worker has begun.
        loss: Of the newest clock that any worker has reported.
        accuracy: Held-out accuracy of the newest snapshot, and its version.
        traffic: Bytes each worker has sent and received.
        began_s: When the first step was reported, on the monotonic clock.
    """

    epoch_count: int
    step_count: int = 0
    batches: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    clocks: dict[str, int] = field(default_factory=dict)
    frontier: int = 0
    epoch: int = 0
    loss: float | None = None
    accuracy: tuple[float, int] | None = None
    traffic: dict[str, int] = field(default_factory=dict)
    began_s: float | None = None
    ended_s: float = 0.0
    _losses: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    def take(self, report: StepReport) -> None:
        clock, worker_id = report["clock"], report["worker_id"]
        self.ended_s = time.monotonic()
        if self.began_s is None:
            self.began_s = self.ended_s
        self.batches.setdefault(clock, {})[worker_id] = report["indices"]
        self.clocks[worker_id] = clock
        self.frontier = max(self.frontier, report["frontier"])
        self.epoch = max(self.epoch, report["epoch"])
        self.traffic[worker_id] = report["traffic_bytes"]
        if clock == max(self.clocks.values()):
            losses = self._losses.setdefault(clock, [])
            losses.append((report["loss"], len(report["indices"])))
            sample_count = sum(count for _, count in losses)
            self.loss = sum(loss * count for loss, count in losses) / sample_count
            self._losses = {clock: losses}

    @property
    def clock(self) -> int:
        return max(self.clocks.values(), default=0)

    @property
    def push_count(self) -> int:
        return sum(map(len, self.batches.values()))

    @property
    def duration_s(self) -> float:
        return 0.0 if self.began_s is None else self.ended_s - self.began_s

    @property
    def steps_per_s(self) -> float:
        return self.clock / self.duration_s if self.duration_s else 0.0

    @property
    def left_text(self) -> str:
        """How long the rest takes at the rate so far."""
        if not self.step_count or not self.steps_per_s:
            return "-"
        left = max(0, self.step_count - self.clock)
        return duration_text(left / self.steps_per_s)

    @property
    def traffic_bytes(self) -> int:
        return sum(self.traffic.values())

    @property
    def ahead(self) -> str:
        leaders = [name for name in self.clocks if self.clocks[name] == self.clock]
        if not leaders:
            return "-"
        return "all level" if len(leaders) == len(self.clocks) else ", ".join(leaders)

    def columns(self) -> list[tuple[str, str]]:
        """Names and values of what is shown while the demo runs."""
        from pswire.byte_text import byte_text

        accuracy = "-" if self.accuracy is None else f"{self.accuracy[0]:.3f}"
        return [
            ("epoch", f"{self.epoch + 1}/{self.epoch_count}"),
            ("step", str(self.clock)),
            ("loss", "-" if self.loss is None else f"{self.loss:.4f}"),
            ("test accuracy", accuracy),
            ("steps/s", f"{self.steps_per_s:.0f}"),
            ("left", self.left_text),
            ("sent and received", byte_text(self.traffic_bytes)),
            ("ahead", self.ahead),
        ]
