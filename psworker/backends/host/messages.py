"""Messages between the processes of a host group: plain values.

Steps and membership come first, then questions to the leader beside steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pswire.leased_data import DataRange, DataReport, EpochReport, EpochShape
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason
from psworker.backends.backend import LeaderError
from psworker.errors import PsError
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import Groups
from psworker.transport.values import (
    EpochRequest,
    Lease,
    LeaseRequest,
    OptimizerSettings,
)


class ProcessId(NamedTuple):
    """One life of one process of a group; in the order of sums and of leaders.

    Attributes:
        number: On this machine; after an exclusion it is the same.
        life: Drawn when it entered.
    """

    number: int
    life: int


@dataclass(frozen=True, slots=True, order=True)
class View:
    """Who is in a group. The one with the higher number counts, then leader.

    Attributes:
        number: Grows with every change.
        leader: Which process is the member of the job.
        members: Whose gradients a step waits for, in order.
        founder: First leader. Where two groups were begun at once, one gives way.
    """

    number: int
    leader: ProcessId
    members: tuple[ProcessId, ...]
    founder: ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One process's part of a step. Its gradient lies in its own memory.

    Attributes:
        weight: Samples behind it.
        presence: Entries of the schema that it has.
        groups: Hyperparameters of the optimizer.
        is_finite: Whether a loss scaler found it finite.
        ranges: Data behind it.
        spec_digest: Declaration of the optimizer.
        scheduler_steps: Steps of its schedulers.
        loads_state: Whether the script has loaded state of the optimizer before.
        optimizer: Name of the optimizer.
        continues_batch: Whether it is a further step on the batch of the one before.
    """

    weight: float
    presence: tuple[bool, ...]
    groups: Groups = ()
    is_finite: bool = True
    ranges: tuple[DataRange, ...] = ()
    spec_digest: str = ""
    scheduler_steps: tuple[int, ...] = ()
    loads_state: bool = False
    optimizer: str = ""
    continues_batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlace:
    """Where the group stands in the job when a push begins, as its leader knows.

    Attributes:
        worker: The group's identity.
        sequence: Number of the push.
        clock: Clock that it completes.
        is_first_worker: Whether this is the job's first worker, whose buffers count.
        is_of_longest: Whether no worker has been in the job for longer.
        is_stale: Whether gradients are of values that were not the job's.
        is_void: Whether the data behind them is not the group's either, since it was
            evicted.
    """

    worker: WorkerKey
    sequence: int
    clock: int
    is_first_worker: bool = False
    is_of_longest: bool = False
    is_stale: bool = False
    is_void: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One try to add up the gradients of a step, numbered within a view."""

    step: int
    view: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """The leader's order to add up.

    Attributes:
        attempt: Which try.
        parts: Of each process, in the order of process ids, which is that of sums.
    """

    attempt: Attempt
    parts: Mapping[ProcessId, StepPart]


@dataclass(frozen=True, slots=True)
class Reduced:
    """A process has added up its share of the mean, which has this sum of squares."""

    attempt: Attempt
    square_sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """A step as it is pushed, whichever process leads.

    Everything that another leader needs to send the same bytes under the same number.

    Attributes:
        step: Number of the step.
        place: Where the group stands in the job.
        parts: Of each contributor.
        square_sum: Sum of squares of the mean gradient.
    """

    step: int
    place: PushPlace
    parts: Mapping[ProcessId, StepPart]
    square_sum: float

    @property
    def weight(self) -> float:
        """Samples behind the push."""
        if self.place.is_stale:
            return 0.0
        return sum(part.weight for part in self.parts.values())

    @property
    def is_finite(self) -> bool:
        """Whether every process found its gradient finite."""
        return all(part.is_finite for part in self.parts.values() if part.weight > 0)

    @property
    def continues_batch(self) -> bool:
        """Whether some process goes on with its batch."""
        return any(part.continues_batch for part in self.parts.values())

    @property
    def ranges(self) -> tuple[DataRange, ...]:
        """Data behind the push, in the order of process ids."""
        return () if self.place.is_stale else self.drawn

    @property
    def drawn(self) -> tuple[DataRange, ...]:
        """Data that the processes have drawn for it, in the order of process ids."""
        if self.place.is_void:
            return ()
        return tuple(each for part in self.parts.values() for each in part.ranges)

    @property
    def leading(self) -> StepPart:
        """Whose hyperparameters count: the first that has weight, else the first."""
        return leading_part(self.parts)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A process keeps the seal of a step."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """The group in the job after a step, for all its processes.

    Attributes:
        token: Under which its leaders register at the coordinator.
        worker: Its identity.
        rank: Its index among the workers.
        worker_count: Workers of the job.
        sequence: Last push that is settled.
        clock: Clocks it has completed.
        generation: Newest one known.
        mode: How workers keep together.
        rejoin_count: How often it was evicted and has joined again.
        last_push: What became of the newest push.
        unreported: Data of its pushes that may not be reported to the coordinator.
        first_epochs: By loader, the first epoch that was not over when it joined last.
    """

    token: str
    worker: WorkerKey
    rank: int
    worker_count: int
    sequence: int
    clock: int
    generation: int
    mode: str
    rejoin_count: int = 0
    last_push: PushResult | None = None
    unreported: DataReport = field(default_factory=DataReport)
    first_epochs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step is over, and its values can be copied.

    Attributes:
        step: Number of the step; 0 before the first.
        source: In whose memory the values are.
        status: Of the group.
        parts: Whose gradients were in it.
        is_discarded: Whether they were thrown away.
        is_void: Whether the data behind them is dealt anew, as the group was evicted.
        written: Buffers that have new values.
        is_whole: Whether everything is to be copied, not only what steps change.
    """

    step: int
    source: ProcessId
    status: GroupStatus
    parts: Mapping[ProcessId, StepPart] = field(default_factory=dict)
    is_discarded: bool = False
    is_void: bool = False
    written: frozenset[int] = frozenset()
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Offered:
    """A member's part of a step, for the leader."""

    step: int
    part: StepPart


@dataclass(frozen=True, slots=True)
class Enter:
    """A process asks the leader to be admitted.

    Attributes:
        met: Whose memory it has. Others had ended when it came, and the leader will
            notice that.
    """

    met: frozenset[ProcessId]


@dataclass(frozen=True, slots=True)
class Admit:
    """The leader admits a process, which copies the values of the last step."""

    view: View
    done: Done


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a member knows, for a new leader.

    Attributes:
        view: Number of the view that it answers.
        seal: The newest that it has.
        done: The last step that is over for it.
        part: Of the next step, if it has offered one.
        hand: Data that was dealt to it, and is behind no step that is over.
    """

    view: int
    seal: Seal | None
    done: Done
    part: StepPart | None
    hand: frozenset[DataRange] = frozenset()


@dataclass(frozen=True, slots=True)
class Failed:
    """The leader could not finish a step, or join the job."""

    leader: ProcessId
    error: LeaderError

    def to_error(self) -> PsError:
        """The same error, for a process that follows."""
        return self.error.to_error(f"process {self.leader.number} of this host's group")


@dataclass(frozen=True, slots=True)
class Excluded:
    """The group goes on without the process that receives this."""


@dataclass(frozen=True, slots=True)
class Bye:
    """A process leaves in good order."""


Message = (
    View
    | Offered
    | Reduce
    | Reduced
    | Seal
    | Sealed
    | Done
    | Enter
    | Admit
    | State
    | Failed
    | Excluded
    | Bye
)


def leading_part(parts: Mapping[ProcessId, StepPart]) -> StepPart:
    """Of the parts of a step, whose hyperparameters count."""
    ordered: Sequence[StepPart] = [parts[process] for process in sorted(parts)]
    return next((part for part in ordered if part.weight > 0), ordered[0])


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
    """The group was evicted: rejoins if it still has this count; its `GroupStatus`."""

    rejoin_count: int


Question = (
    EpochRequest
    | LeaseRequest
    | GiveBack
    | AwaitTurn
    | OptimizerStateOf
    | SettingsOf
    | RejoinJob
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the leader, numbered by who asks; `None` cancels that number."""

    number: int
    question: Question | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The leader's answer to the question of that number, or a `LeaderError`."""

    number: int
    result: object

    def value(self) -> object:
        """The result.

        Raises:
            PsError: The leader could not.
        """
        if isinstance(self.result, LeaderError):
            raise self.result.to_error()
        return self.result


VALUES: Final = (
    *(Admit, Answer, Ask, Attempt, AwaitTurn, Bye, Done, Enter, Excluded, Failed),
    *(GiveBack, GroupStatus, Offered, OptimizerStateOf, ProcessId, PushPlace, Reduce),
    *(Reduced, RejoinJob, Seal, Sealed, SettingsOf, State, StepPart, View),
    *(DataRange, DataReport, EpochReport, EpochRequest, EpochShape, ErrorReason, Lease),
    *(LeaderError, LeaseRequest, OptimizerSettings, PushResult, WorkerKey),
)
"""All classes that messages are made of."""
