"""What a run of the fault tests has counted, and the table that says so."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from psctl.tables import aligned


@dataclass
class Tally:
    """Counts over all jobs of a test, or of many.

    Attributes:
        seed: Of where connections are cut.
        lease_s: Of the jobs' workers.
        faults: Faults injected, by kind.
        counts: Of pushes, as `psctl check-history` counts them.
        kill_s: From each SIGKILL of a worker in BSP to the next clock without it.
        stop_s: From each SIGSTOP of a worker in BSP to the next clock without it.
        job_count: Jobs that have ended.
    """

    seed: int
    lease_s: float
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    kill_s: list[float] = field(default_factory=list)
    stop_s: list[float] = field(default_factory=list)
    job_count: int = 0

    def as_values(self) -> dict[str, Any]:
        """Itself in what one process of pytest can tell another."""
        return {
            "seed": self.seed,
            "lease_s": self.lease_s,
            "faults": dict(self.faults),
            "counts": dict(self.counts),
            "kill_s": self.kill_s,
            "stop_s": self.stop_s,
            "job_count": self.job_count,
        }

    @classmethod
    def of_all(cls, parts: Iterable[Mapping[str, Any]]) -> Self | None:
        """The sum of what tests have told; None when none of them had a job."""
        total: Self | None = None
        for part in parts:
            if total is None:
                total = cls(part["seed"], part["lease_s"])
            total.faults.update(part["faults"])
            total.counts.update(part["counts"])
            total.kill_s += part["kill_s"]
            total.stop_s += part["stop_s"]
            total.job_count += part["job_count"]
        return total if total is not None and total.job_count else None

    def text(self) -> str:
        """The table, as docs/guarantees.md has it."""
        rows = [
            ("jobs of real processes", str(self.job_count)),
            ("faults injected", str(sum(self.faults.values()))),
            ("acknowledged pushes", str(self.counts["acknowledged"])),
            ("... of these lost", str(self.counts["lost"])),
            ("pushes applied twice", str(self.counts["applied_twice"])),
            (
                f"SIGKILL of a worker to the next clock, {self.lease_s:g} s lease",
                seconds(self.kill_s),
            ),
            (
                f"SIGSTOP of a worker to the next clock, {self.lease_s:g} s lease",
                seconds(self.stop_s),
            ),
        ]
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.faults.items())
        table = aligned(("what", "count"), rows)
        return f"seed {self.seed}\n\n{table}\n\nfaults: {kinds}"


def seconds(values: list[float]) -> str:
    if not values:
        return "-"
    middle, worst = statistics.median(values), max(values)
    return f"median {middle:.2f} s, max {worst:.2f} s ({len(values)} times)"
