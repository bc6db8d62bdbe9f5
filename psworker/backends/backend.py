"""What is behind a connection: the protocol that each way to train implements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pswire.leased_data import RecordedSplit
from pswire.reasons import ErrorReason
from psworker.backends.between_pushes import BetweenPushes
from psworker.errors import PsError
from psworker.member.script_state import HasState, RewindCallback
from psworker.optim.named_objects import NamedObjects
from psworker.optim.prepare import PrepareOptions
from psworker.optim.published import Published
from psworker.optim.push_result import PushResult
from psworker.transport.ports import Traffic
from psworker.work_log import WorkLog

GROUP_PUBLISH_TEXT: Final = (
    "publish() is not possible in a group of processes that push as one: set values "
    "before prepare(), or start each process as a worker of its own"
)
"""Each process would need the values of all others."""


GROUP_STATE_TEXT: Final = (
    "register_state() is not possible in a group of processes that push as one, nor "
    "before prepare() where there is a group: store what belongs to the group in a "
    "prepared model's buffers, or start each process as a worker of its own"
)
"""Which process of a group leads may change, and the others' state would be lost."""

GROUP_REWIND_TEXT: Final = (
    "on_rewind() is not possible in a group of processes that push as one, nor before "
    "prepare() where there is a group: start each process as a worker of its own"
)


GROUP_STRATEGY_TEXT: Final = (
    "a strategy is not possible in a group of processes that push as one: start each "
    "process as a worker of its own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where a worker stands in its job, as far as this process knows.

    Attributes:
        worker_id: Its name; the wanted one before it has any.
        mode: How workers keep together, empty where that is not known yet.
        rank: Its index among the workers, `None` before it has joined.
        worker_count: Workers of the job, 0 before it has joined.
        clock: Clocks it has completed.
        generation: Newest one known.
        last_push: What became of its newest push.
    """

    worker_id: str
    mode: str
    rank: int | None = None
    worker_count: int = 0
    clock: int = 0
    generation: int = 0
    last_push: PushResult | None = None


@dataclass(frozen=True, slots=True)
class LeaderError:
    """An error of a process that leads a group, as the others receive it."""

    kind: type[PsError]
    text: str
    reason: ErrorReason | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException) -> "LeaderError":
        """An error that is none of psworker's becomes a `PsError`."""
        if isinstance(error, PsError):
            return cls(type(error), str(error), error.reason, error.facts)
        return cls(PsError, f"{type(error).__name__}: {error}")

    def to_error(self, leader: str = "") -> PsError:
        """The same error; it names the leader if that is given."""
        text = self.text
        if leader:
            text = f"{leader}, which speaks to the job for all of it, failed: {text}"
        return self.kind(text, reason=self.reason, facts=self.facts)


class Backend(Protocol):
    """One way to train: as a worker of a job, as a part of one, or alone.

    `psworker.Connection` calls it, one call at a time: not after `close`, and not in a
    forked child. What is public about a connection, checks of arguments that all
    backends share, and the end of the process are the connection's.
    """

    @property
    def coordinator(self) -> str:
        """HOST:PORT of the job, empty where there is none.

        Where there is one, a connection leaves it when the script ends, and no forked
        child may use it.
        """
        ...

    @property
    def title(self) -> str:
        """What this process is in the job, for `repr`: of a group, which process."""
        ...

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job, for itself or for a group."""
        ...

    @property
    def is_out(self) -> bool:
        """Whether the job is over, or goes on without this process."""
        ...

    @property
    def place(self) -> WorkerPlace:
        """Where the worker stands: no call, and no wait."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Bytes of all messages between this process and shards."""
        ...

    @property
    def work(self) -> WorkLog:
        """What the script of this process does, and what it logs."""
        ...

    @property
    def between_pushes(self) -> BetweenPushes:
        """What local steps need of the worker, once it has joined.

        Raises:
            UnsupportedError: Processes that push as one take none.
        """
        ...

    def join(self, call: NamedObjects, options: PrepareOptions) -> Mapping[int, Any]:
        """Trains from now on, with the objects of the first `prepare`.

        Returns when the models hold the values to begin with, and `place` has a rank.
        After an error it has none, and is called again when the script does.

        Returns:
            Replacements of objects, by their `id()`; all others stay as they are.

        Raises:
            PsError: As `Connection.prepare`.
        """
        ...

    def exchange(
        self, call: NamedObjects, options: PrepareOptions
    ) -> Mapping[int, Any]:
        """Replaces optimizers: `prepare` was called again, after `join`.

        Returns:
            As `join`.

        Raises:
            ConfigurationError: It does not fit the first call.
            UnsupportedError: This backend can't.
        """
        ...

    def settle(self) -> None:
        """Completes a step that is under way; the models then hold its values.

        Raises:
            StepTimeoutError: Some worker or shard was late.
        """
        ...

    def publish(self, what: Sequence[Published]) -> None:
        """Makes the values of these, of all models by default, those of the job.

        Raises:
            ConfigurationError: A tensor belongs to no prepared model.
            UnsupportedError: This backend can't.
        """
        ...

    def record_split(self, record: RecordedSplit) -> RecordedSplit:
        """Records a split under its name; the recorded one, which may be another.

        Raises:
            ConfigurationError: This process can't, or can't yet.
        """
        ...

    def register_state(self, name: str, holder: HasState) -> None:
        """Has checkpoints take the state of an object, and loads what they have.

        Raises:
            ConfigurationError: The name is taken.
            NotStorableError: Its state can't be stored.
            UnsupportedError: This backend can't.
        """
        ...

    def on_rewind(self, callback: RewindCallback) -> None:
        """Has a callback called when the job has returned to a checkpoint.

        Raises:
            UnsupportedError: This backend can't.
        """
        ...

    def close(self, *, leaves: bool) -> None:
        """Ends everything. Steps that are made later are refused.

        Args:
            leaves: Whether the worker is done, and leaves the job. If not, an error has
                ended it, and the job counts it as lost. An error on the way out is
                logged, not raised: the script is done.
        """
        ...
