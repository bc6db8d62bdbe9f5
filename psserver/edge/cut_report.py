"""What a shard reports of a cut. Pure."""

from dataclasses import dataclass

from psserver.edge.fence_report import WorkerHolding
from pswire.checkpoint.manifest import FilePart


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


@dataclass(frozen=True, slots=True)
class PartReport:
    """A shard's part of a checkpoint is written, or failed.

    Attributes:
        snapshot_id: Name of the cut.
        part: The file; None if it can't be written.
        is_finite: Whether all of its values are finite.
        failure: Why it can't be written; empty when it is.
    """

    snapshot_id: int
    part: FilePart | None = None
    is_finite: bool = True
    failure: str = ""
