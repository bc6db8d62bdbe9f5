"""What a shard reports of a cut. Pure."""

from dataclasses import dataclass

from psserver.edge.fence_report import WorkerHolding


@dataclass(frozen=True, slots=True)
class CutReport:
    """A shard's copy of a cut is made, or failed.

    Attributes:
        snapshot_id: Name of the cut.
        failure: Why it failed; empty when it is made.
        holdings: If the cut is for a checkpoint, what the copy has of each member.
    """

    snapshot_id: int
    failure: str = ""
    holdings: tuple[WorkerHolding, ...] = ()
