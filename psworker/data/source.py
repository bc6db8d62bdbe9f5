"""What leased loading needs of a connection, as an interface.

Every call starts work on the event loop and returns its future, so that the user's
thread can wait for several things at once. Cancelling a future cancels its call.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from psworker.data.pending import PendingData
from psworker.transport.values import EpochRequest, Lease, LeaseRequest
from psworker.work_log import WorkLog

if TYPE_CHECKING:
    from pswire.leased_data import Origin
    from psworker.event_loop import LoopFuture


class SampleCount(Protocol):
    """What a loader needs to count what it hands out."""

    @property
    def work(self) -> WorkLog:
        """What the script does, and for how long."""
        ...

    @property
    def pending(self) -> PendingData:
        """What was drawn and not yet pushed or reported."""
        ...

    @property
    def worker_count(self) -> int:
        """Workers that share the data now, at least 1."""
        ...

    @property
    def rank(self) -> int:
        """This worker's place among these, from 0."""
        ...

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient was begun that no step has taken yet."""
        ...


class DataSource(SampleCount, Protocol):
    """A connection, as a loader sees it.

    A call, or its future, raises `EvictedError` when the job has gone on without this
    worker. `rejoin` then brings it back; what it held before is not its own any more.
    """

    @property
    def rejoin_count(self) -> int:
        """How often the worker was evicted and has joined again."""
        ...

    def open_before(self, loader: str, epoch: int) -> Iterable[int]:
        """Epochs before one of which something was left when the worker last joined."""
        ...

    def enter_again(self, loader: str, epoch: int) -> None:
        """Batches of an epoch come next, after the worker has joined again.

        The script may have been through its beginning before.
        """
        ...

    @property
    def sharer_count(self) -> int:
        """Workers that take ranges on demand; 0 where ranges are dealt in rounds."""
        ...

    def dealt_count(self, batch_count: int) -> int:
        """Of the batches of an epoch those that this worker gets.

        Exact where they are dealt in rounds and nobody joins or leaves; else its equal
        part, rounded up.
        """
        ...

    def note_draw(self, loader: str, epoch: int) -> None:
        """The script asks for a batch: it is done with its last step."""
        ...

    def settle(self) -> None:
        """Completes a step that is under way, so that reports have its data."""
        ...

    def rejoin(self, rejoin_count: int) -> None:
        """Joins again after an eviction, unless it has since `rejoin_count`."""
        ...

    def open_epoch(self, request: EpochRequest) -> "LoopFuture[Origin]":
        """Opens an epoch; returns what its order is drawn from: the first `origin`."""
        ...

    def lease_data(self, request: LeaseRequest) -> "LoopFuture[Lease]":
        """Leases ranges."""
        ...

    def await_contribution(self) -> "LoopFuture[None]":
        """Done once the next clock waits for nobody but workers without data."""
        ...

    def end_round(self) -> None:
        """There is no more data for now: pushes what local steps have trained."""
        ...

    def push_nothing(self) -> None:
        """Pushes weight 0 for the next clock, and pulls."""
        ...

    def holders(self) -> str:
        """Who has what is left of the epoch, in words, as far as it is known."""
        ...


def part_in_rounds(batch_count: int, place: int, place_count: int) -> int:
    """Of batches that are dealt one after the other those that one place gets."""
    return max(0, -(-(batch_count - place) // place_count))
