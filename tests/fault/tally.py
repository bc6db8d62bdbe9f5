"""What a run of the fault tests has counted, and the table that says so."""

import statistics
from collections import Counter
from dataclasses import dataclass, field

from psworker.ctl.tables import aligned


@dataclass
class Tally:
    """Counts over all jobs.

    Attributes:
        faults: Faults injected, by kind.
        counts: Of pushes, as `psctl check-history` counts them.
        kill_s: From each SIGKILL of a worker in BSP to the next clock without it.
        stop_s: From each SIGSTOP of a worker in BSP to the next clock without it.
        job_count: Jobs that have ended.
    """

    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    kill_s: list[float] = field(default_factory=list)
    stop_s: list[float] = field(default_factory=list)
    job_count: int = 0

    def text(self, lease_s: float) -> str:
        """For the README."""
        rows = [
            ("jobs of real processes", str(self.job_count)),
            ("faults injected", str(sum(self.faults.values()))),
            ("acknowledged pushes", str(self.counts["acknowledged"])),
            ("... of these lost", str(self.counts["lost"])),
            ("pushes applied twice", str(self.counts["applied_twice"])),
            (
                f"SIGKILL of a worker to the next clock, {lease_s:g} s lease",
                seconds(self.kill_s),
            ),
            (
                f"SIGSTOP of a worker to the next clock, {lease_s:g} s lease",
                seconds(self.stop_s),
            ),
        ]
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.faults.items())
        return aligned(("what", "count"), rows) + f"\n\nfaults: {kinds}"


def seconds(values: list[float]) -> str:
    if not values:
        return "-"
    middle, worst = statistics.median(values), max(values)
    return f"median {middle:.2f} s, max {worst:.2f} s ({len(values)} times)"
