"""What the state machine of a host group wants done: plain values.

The event loop carries an `Effect` out; of these it hands an `Order` to the user's
thread, where tensors are: that is in `prepare` or `step` whenever there is one.
"""

from dataclasses import dataclass

from psworker.backends.host.messages import (
    Admit,
    Done,
    Excluded,
    Failed,
    Message,
    ProcessId,
    Reduce,
    Seal,
)


@dataclass(frozen=True, slots=True)
class Found:
    """Join the job for a group that has no leader yet."""


@dataclass(frozen=True, slots=True)
class Arrive:
    """All have offered their parts of `step`: find the group's place in the job."""

    step: int
    done: Done


@dataclass(frozen=True, slots=True)
class Push:
    """Send a sealed step, some of which may have been sent before if it is a repeat."""

    seal: Seal
    done: Done
    is_repeat: bool


Task = Found | Arrive | Reduce | Push | Done | Admit | Failed | Excluded


@dataclass(frozen=True, slots=True)
class Order:
    """Something for the user's thread to do."""

    task: Task


@dataclass(frozen=True, slots=True)
class Send:
    """A message to another process of the group."""

    process: ProcessId
    message: Message


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the link to a process."""

    process: ProcessId


@dataclass(frozen=True, slots=True)
class Lead:
    """Lead from now on, as the member that the group is already."""

    done: Done


Effect = Order | Send | Drop | Lead
