"""What the state machine of a host group wants done: plain values.

An `Effect` is for the thread that talks. Of these `Order` holds what the user's thread
does, where tensors are: it is in `prepare` or `step` whenever one comes.
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
    """All have brought their gradients: find the group's place in the job.

    Attributes:
        step: The step.
        done: The last one that is over.
    """

    step: int
    done: Done


@dataclass(frozen=True, slots=True)
class Push:
    """Send a sealed step to the shards.

    Attributes:
        seal: The step.
        done: The last one that is over.
        is_repeat: Whether some of it may have been sent before.
    """

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
    """Nothing is to do with a process any more."""

    process: ProcessId


@dataclass(frozen=True, slots=True)
class Lead:
    """This process leads from now on, as the member that the group is already.

    Attributes:
        done: The last step that is over.
    """

    done: Done


Effect = Order | Send | Drop | Lead
