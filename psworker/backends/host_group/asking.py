"""What processes of a host group ask of their leader beside steps: plain values."""

from dataclasses import dataclass

from pswire.leased_data import DataRange, DataReport
from psworker.backends.host_group.agreement import Failed
from psworker.data.order import EpochShape
from psworker.data.source import LeaseRequest
from psworker.errors import PsError


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """Opens an epoch; what its order is drawn from, an `Origin`."""

    loader: str
    epoch: int
    shape: EpochShape
    origin: bytes
    report: DataReport


@dataclass(frozen=True, slots=True)
class LeaseBatches:
    """Some batches of an epoch: a `Lease`."""

    request: LeaseRequest


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Batches that came too late to be used; nothing."""

    ranges: tuple[DataRange, ...]


@dataclass(frozen=True, slots=True)
class AwaitTurn:
    """Answered when a step waits for a process that has no data; nothing."""


@dataclass(frozen=True, slots=True)
class OptimizerStateOf:
    """The state of an optimizer after the group's last push."""

    optimizer: str
    spec_digest: str


@dataclass(frozen=True, slots=True)
class SettingsOf:
    """What the newest update of an optimizer was made with."""

    optimizer: str


@dataclass(frozen=True, slots=True)
class RejoinJob:
    """The group was evicted: joins again, if it did not since; its `Standing`.

    Attributes:
        rejoin_count: As the process that asks knows it.
    """

    rejoin_count: int


Question = (
    OpenEpoch
    | LeaseBatches
    | GiveBack
    | AwaitTurn
    | OptimizerStateOf
    | SettingsOf
    | RejoinJob
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the leader.

    Attributes:
        number: Of the process that asks.
        question: The question; `None` takes it back.
    """

    number: int
    question: Question | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The leader's.

    Attributes:
        number: Of the question.
        result: What there is to say, or why not.
    """

    number: int
    result: object

    def value(self) -> object:
        """The result.

        Raises:
            PsError: The leader could not.
        """
        if isinstance(self.result, Refused):
            raise self.result.to_error()
        return self.result


@dataclass(frozen=True, slots=True)
class Refused:
    """An error of the leader, as it is: it speaks of the group, whoever asks."""

    failure: Failed

    def to_error(self) -> PsError:
        """The same error."""
        failure = self.failure
        return failure.kind(
            failure.text, reason=failure.reason, facts=dict(failure.facts)
        )
