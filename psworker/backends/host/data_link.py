"""What leased loaders need, in a process of a host group: a `psworker.data.DataSource`.

Everything is asked of the group's leader, who leases for all of it.
"""

from typing import TYPE_CHECKING

from pswire.leased_data import DataReport, EpochShape
from pswire.membership import Mode
from psworker.backends.host.messages import AwaitTurn, LeaseBatches, OpenEpoch
from psworker.data.pending import PendingData
from psworker.data.source import Lease, LeaseRequest, part_in_rounds

if TYPE_CHECKING:
    from pswire.leased_data import Origin
    from psworker.backends.host.steps import HostSteps
    from psworker.event_loop import LoopFuture
    from psworker.optim.optimizer import PreparedOptimizer


class HostDataLink:
    """A process of a group, as its loaders see it."""

    def __init__(self) -> None:
        """Knows nobody: loaders are named before the group meets."""
        self._steps: HostSteps | None = None
        self._optimizer: PreparedOptimizer | None = None

    def start(self, steps: "HostSteps", optimizer: "PreparedOptimizer") -> None:
        """The process is in its group now."""
        self._steps = steps
        self._optimizer = optimizer

    @property
    def _here(self) -> "HostSteps":
        assert self._steps is not None, "loaders are handed out after joining"
        return self._steps

    @property
    def pending(self) -> PendingData:
        """What was drawn and not yet pushed or reported."""
        return self._here.pending

    @property
    def rejoin_count(self) -> int:
        """How often this process, or its group, was left out and has come again."""
        return self._here.rejoin_count

    @property
    def sharer_count(self) -> int:
        """Processes that take ranges on demand; 0 where they are dealt in rounds."""
        status = self._here.status
        if Mode.labelled(status.mode).rules.deals_rounds:
            return 0
        return status.worker_count * self._here.member_count

    @property
    def worker_count(self) -> int:
        """Processes that share the data, if all workers are groups like this one."""
        return max(1, self._here.status.worker_count) * self._here.member_count

    @property
    def rank(self) -> int:
        """This process's place among these, from 0."""
        return self._here.status.rank * self._here.member_count + self._here.place

    def dealt_count(self, batch_count: int) -> int:
        """Of the batches of an epoch those that this process gets."""
        if self.sharer_count:
            return part_in_rounds(batch_count, 0, self.worker_count)
        status, here = self._here.status, self._here
        of_group = part_in_rounds(batch_count, status.rank, max(1, status.worker_count))
        return part_in_rounds(of_group, here.place, here.member_count)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient was begun that no step has taken yet."""
        return self._here.has_gradient

    def settle(self) -> None:
        """Checks that the group has not gone on without this process."""
        self._here.refuse_out()

    def rejoin(self) -> None:
        """Comes again after the group, or the job, has gone on without it."""
        self._here.rejoin()

    def open_epoch(
        self,
        loader: str,
        epoch: int,
        shape: EpochShape,
        origin: bytes,
        report: DataReport,
    ) -> "LoopFuture[Origin]":
        """Opens an epoch; what its order is drawn from."""
        self._here.refuse_out()
        return self._here.driver.ask(OpenEpoch(loader, epoch, shape, origin, report))

    def lease_data(self, request: LeaseRequest) -> "LoopFuture[Lease]":
        """Leases ranges."""
        self._here.refuse_out()
        return self._here.driver.ask(LeaseBatches(request))

    def await_contribution(self) -> "LoopFuture[None]":
        """Done once a step of the group, or of the job, waits for nobody with data."""
        self._here.refuse_out()
        return self._here.driver.ask(AwaitTurn())

    def holders(self) -> str:
        """Empty: what the coordinator tells of it comes to the leading process only."""
        return ""

    def push_nothing(self) -> None:
        """Takes part in the group's next push with nothing."""
        assert self._optimizer is not None, "loaders are handed out after joining"
        self._optimizer.push_nothing()
