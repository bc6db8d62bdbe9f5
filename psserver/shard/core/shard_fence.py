"""A shard's side of a fence.

From its report until record n, abort n or, for a cut, the decision, a shard receives
and stages but applies, commits and acknowledges nothing. It reports only when
nothing is being applied any more.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from psserver.shard.core.core_image import CoreImage
from pswire.membership import CutPurpose, FenceKind, WorkerKey


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a cut lies, and what its image is for.

    Attributes:
        snapshot_id: Name of the snapshot.
        clock: In BSP, the highest clock that is in.
        sequences: In SSP and ASP, of each member its last push that is in.
        purpose: What its image is for.
    """

    snapshot_id: int
    clock: int
    sequences: Mapping[WorkerKey, int] = field(default_factory=dict)
    purpose: CutPurpose = CutPurpose.SNAPSHOT


@dataclass(frozen=True, slots=True)
class PendingCut:
    """A cut that is decided, and that this shard has not come to yet.

    Attributes:
        cut: The cut.
        is_streamed: Whether its sequences decide, since pushes are applied by
            themselves, or else its clock.
    """

    cut: Cut
    is_streamed: bool


@dataclass(slots=True)
class OpenFence:
    """A fence that has been prepared.

    Attributes:
        fence_number: Its number.
        kind: What it is for.
        seeder: For a start, whose values count.
        evicting: Workers whose data is to be reported.
        seeded: For a start, chunks that are staged.
        loads: Whether a start has the values of a checkpoint.
        core: For such a start, the protocol of the checkpoint.
        failure: Why they can't be loaded.
        reported: Whether the report is out.
    """

    fence_number: int
    kind: FenceKind
    seeder: WorkerKey | None
    evicting: tuple[WorkerKey, ...]
    seeded: set[int]
    loads: bool = False
    core: CoreImage | None = None
    failure: str = ""
    reported: bool = False

    def is_seeded(self, chunk_indexes: Collection[int]) -> bool:
        """Whether all is staged that a start needs, or will never be."""
        is_whole = self.seeded == chunk_indexes and not (
            self.loads and self.core is None
        )
        return is_whole or bool(self.failure)


class ShardFence:
    """Fences as one shard sees them; numbers only grow.

    Attributes:
        open: The fence that is prepared.
        pending: The cut that is decided.
        is_orphaned: Whether the coordinator has been silent for a lease: it may have
            given this shard up.
        batch_floors: While a checkpoint waits for all to be between two batches, of
            each member a push beyond which none that begins a batch is applied.
    """

    def __init__(self) -> None:
        self.open: OpenFence | None = None
        self.pending: PendingCut | None = None
        self.is_orphaned = False
        self.batch_floors: Mapping[WorkerKey, int] = {}
        self._last_number = 0

    @property
    def waits_for(self) -> str:
        """What must end before anything is applied, in words; empty when nothing."""
        if self.is_orphaned:
            return "the coordinator, which has been silent for a lease"
        if self.open is not None:
            return f"the coordinator to decide {self.open.kind.purpose}"
        if self.batch_floors:
            return "a checkpoint, for which all workers are to be between two batches"
        return ""

    @property
    def cut_clock(self) -> int:
        """Clock of the pending cut in BSP, 0 when there is none."""
        if self.pending is None or self.pending.is_streamed:
            return 0
        return self.pending.cut.clock

    @property
    def is_frozen(self) -> bool:
        """Whether applying, committing and acknowledging must wait."""
        return self.open is not None or self.is_orphaned

    def prepare(
        self,
        fence_number: int,
        kind: FenceKind,
        *,
        seeder: WorkerKey | None,
        evicting: tuple[WorkerKey, ...],
        loads: bool = False,
    ) -> bool:
        """Opens a fence, to which a decided cut yields.

        Returns:
            Whether it is new; False for a repeated or an older one.
        """
        if fence_number <= self._last_number:
            return False
        self.pending = None
        self.batch_floors = {}
        self._last_number = fence_number
        self.open = OpenFence(fence_number, kind, seeder, evicting, set(), loads)
        return True

    def close(self, fence_number: int) -> OpenFence | None:
        """Ends the open fence if it has this number or an older one.

        A record that is newer than the open fence says that the fence is over,
        even when its abort was lost with a connection.
        """
        self.batch_floors = {}
        self._last_number = max(self._last_number, fence_number)
        if self.open is None or self.open.fence_number > fence_number:
            return None
        ended, self.open = self.open, None
        return ended

    def decide_cut(self, fence_number: int, pending: PendingCut) -> bool:
        """Turns the open fence into a pending cut; False when it is not open."""
        if self.open is None or self.open.fence_number != fence_number:
            return False
        self.open = None
        self.pending = pending
        return True

    def withdraw_cut(self, snapshot_id: int) -> bool:
        """Forgets a pending cut; False when it is another one."""
        pending = self.pending
        if pending is None or pending.cut.snapshot_id != snapshot_id:
            return False
        self.pending = None
        return True

    def is_beyond_batch(self, worker: WorkerKey, sequence: int) -> bool:
        """Whether a push is to wait for a checkpoint, should it begin a batch."""
        return sequence > self.batch_floors.get(worker, sequence)

    def admits_clock(self, clock: int) -> bool:
        """Whether chunks of a clock of BSP may be applied now."""
        if self.is_frozen:
            return False
        pending = self.pending
        return pending is None or pending.is_streamed or clock <= pending.cut.clock

    def admits_push(self, worker: WorkerKey, sequence: int) -> bool:
        """Whether a member's push that is applied by itself may be applied now."""
        if self.is_frozen:
            return False
        if self.pending is None or not self.pending.is_streamed:
            return True
        return sequence <= self.pending.cut.sequences.get(worker, 0)
