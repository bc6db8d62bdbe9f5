"""What psworker raises, for people and for programs.

    PsError
    ├── ConfigurationError (also ValueError)      wrong use, seen before any call
    │   └── HyperparameterError                   a parameter group's value
    ├── ConnectError (also ConnectionError)       no coordinator was reached
    │   ├── VersionMismatchError                  it speaks another protocol version
    │   └── WorkerIdTakenError                    a living process has that worker id
    ├── AuthenticationError                       no credential, or an invalid one
    ├── PermissionDeniedError                     the credential is for something else
    ├── SchemaMismatchError                       another model than the job's
    ├── OptimizerUnsupportedError                 shards can't run this class
    ├── OptimizerMismatchError                    another optimizer than the job's
    ├── DataOrderError                            another order of data than the job's
    ├── SplitError                                another split than the job's
    ├── PrivacyBudgetError                        no more may be told of the samples
    ├── EvictedError                              the job goes on without this worker
    ├── JobEndedError                             the job is over
    │   └── JobFailedError                        ... because it can't go on
    │       └── ShardLostError                    ... since a shard is lost
    ├── WaitTimeoutError (also TimeoutError)      a wait ended by its deadline
    │   ├── StartTimeoutError                     ... for the start of the job
    │   └── StepTimeoutError                      ... in `optimizer.step()`
    ├── SnapshotError                             no snapshot could be read
    │   └── SnapshotGoneError                     its pin ran out
    ├── UnavailableError                          a peer did not answer in time
    ├── LimitError                                a limit of memory or count
    ├── UnsupportedError                          a later release may do it
    ├── ProtocolError                             the two sides disagree: a bug
    │   ├── CorruptionError                       bytes changed on their way
    │   └── StalenessError                        values older than the mode allows
    ├── ServerError                               a bug of the server
    └── ClosedError                               used after `close()`

Each has `reason`, the `ErrorReason` of a server's refusal or `None`, and `facts`,
the values behind the text.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pswire.names import name_problem, worker_id_problem
from pswire.number_range import NumberRange
from pswire.reasons import ErrorReason, Refusal


class PsError(Exception):
    """Anything that psworker raises on purpose.

    Attributes:
        reason: The server's reason, `None` where no server was asked.
        facts: Values behind the text.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: ErrorReason | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.facts = dict(facts or {})


class ConfigurationError(PsError, ValueError):
    """Wrong use of psworker, seen before anything was sent."""


class HyperparameterError(ConfigurationError):
    """A parameter group holds a value that its optimizer does not take."""


class ConnectError(PsError, ConnectionError):
    """No coordinator was reached; the text says why and what to do."""


class VersionMismatchError(ConnectError):
    """The coordinator speaks another version of the protocol."""


class WorkerIdTakenError(ConnectError):
    """A process that is alive has this worker id."""


class AuthenticationError(PsError):
    """A daemon does not know who calls: no token or certificate that it takes."""


class PermissionDeniedError(PsError):
    """A daemon knows who calls, and that it may not do this."""


class SchemaMismatchError(PsError):
    """The model differs from the job's; the text lists how."""


class OptimizerUnsupportedError(PsError):
    """Shards can't run this optimizer; the text lists those they can."""


class OptimizerMismatchError(PsError):
    """The optimizer differs from the job's, or is stepped out of turn."""


class DataOrderError(PsError):
    """The loader's order of samples differs from the one of the other workers."""


class SplitError(PsError):
    """The split differs from the one that the job recorded under that name."""


class PrivacyBudgetError(PsError):
    """A sample would take part more often than differential privacy allows.

    Raised before anything is drawn, so that the steps before are as they were.
    """


class EvictedError(PsError):
    """The job goes on without this worker."""


class JobEndedError(PsError):
    """The job is over."""


class JobFailedError(JobEndedError):
    """The job can't go on."""


class ShardLostError(JobFailedError):
    """A shard of the job is lost, and its values with it."""


class WaitTimeoutError(PsError, TimeoutError):
    """A wait ended by its deadline; the text names who was waited for."""


class StartTimeoutError(WaitTimeoutError):
    """The job did not start in time."""


class StepTimeoutError(WaitTimeoutError):
    """A step was not complete in time.

    Its push may or may not be part of the parameters. The next `step()` of the same
    optimizer goes on with the same push, and does not send the gradients again.
    """


class SnapshotError(PsError):
    """No snapshot could be read, or no checkpoint made or read."""


class SnapshotGoneError(SnapshotError):
    """The snapshot's pin ran out and its image was freed."""


class UnavailableError(PsError):
    """A peer did not answer in time, or is shutting down."""


class LimitError(PsError):
    """A limit of memory or count would be exceeded."""


class UnsupportedError(PsError):
    """This release can't do it."""


class ProtocolError(PsError):
    """The two sides disagree about the protocol, which is a bug of one of them."""


class CorruptionError(ProtocolError):
    """Bytes arrived other than they were sent."""


class StalenessError(ProtocolError):
    """A shard sent values that are older than the mode allows."""


class ServerError(PsError):
    """A bug of the server."""


class ClosedError(PsError):
    """The connection is closed."""


REFUSALS: Final = (
    PermissionDeniedError,
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    ConnectError,
    DataOrderError,
    OptimizerMismatchError,
    OptimizerUnsupportedError,
    SchemaMismatchError,
    SplitError,
    UnsupportedError,
    WaitTimeoutError,
)
"""Errors that speak of the script, its place or its job, so that their line says all.
Whatever else is raised may be a bug of ours, and keeps its traceback whole."""


FORKED_TEXT: Final = (
    "this process was forked after psworker was connected: connect in the process that "
    "uses the connection, or start this one by spawn"
)


def refuse_closed(*, is_closed: bool) -> None:
    """Raises a `ClosedError` if a connection is closed."""
    if is_closed:
        raise ClosedError("the connection is closed: connect() and prepare() again")


def refuse_name(what: str, name: str, cure: str) -> None:
    """Checks a name that is to be sent.

    Args:
        what: What it names, such as `name of a split`.
        name: The name.
        cure: What to do about another one.

    Raises:
        ConfigurationError: No name in a job is like that.
    """
    _refuse(what, name, name_problem(name), cure)


def refuse_worker_id(worker_id: str, cure: str) -> None:
    """Checks the wanted id of a worker, as `refuse_name`."""
    _refuse("worker id", worker_id, worker_id_problem(worker_id), cure)


def refuse_numbers(allowed: NumberRange, owner: str = "", **given: object) -> None:
    """Checks numbers that a user gives.

    Args:
        allowed: Which ones may be.
        owner: What has them, where the call that is under way does not say it.
        given: The numbers, by their names.

    Raises:
        ConfigurationError: One is none, or out of range.
    """
    prefix = f"{owner}: " if owner else ""
    for name, number in given.items():
        if problem := allowed.problem(number):
            raise ConfigurationError(f"{prefix}{name}={problem}")


def _refuse(what: str, name: str, problem: str, cure: str) -> None:
    if problem:
        raise ConfigurationError(f"the {what} {name[:64]!r} {problem}; {cure}")


ERROR_CLASSES: Final[Mapping[ErrorReason, type[PsError]]] = MappingProxyType(
    {
        ErrorReason.INTERNAL: ServerError,
        ErrorReason.MALFORMED_MESSAGE: ProtocolError,
        ErrorReason.PROTOCOL_VERSION: VersionMismatchError,
        ErrorReason.JOB_UNKNOWN: JobEndedError,
        ErrorReason.SCHEMA_MISMATCH: SchemaMismatchError,
        ErrorReason.OPTIMIZER_UNSUPPORTED: OptimizerUnsupportedError,
        ErrorReason.OPTIMIZER_MISMATCH: OptimizerMismatchError,
        ErrorReason.HYPERPARAMETER_INVALID: HyperparameterError,
        ErrorReason.WORKER_UNKNOWN: EvictedError,
        ErrorReason.WORKER_ID_TAKEN: WorkerIdTakenError,
        ErrorReason.WORKER_INCARNATION_STALE: EvictedError,
        ErrorReason.SHARD_INCARNATION_STALE: ShardLostError,
        ErrorReason.SHARD_UNKNOWN: ProtocolError,
        ErrorReason.SHARD_LOST: ShardLostError,
        ErrorReason.SEQUENCE_GAP: ProtocolError,
        ErrorReason.PUSH_CONFLICT: ProtocolError,
        ErrorReason.CHUNK_INVALID: ProtocolError,
        ErrorReason.CHUNK_DIGEST_MISMATCH: CorruptionError,
        ErrorReason.NOT_STARTED: UnavailableError,
        ErrorReason.RECOVERING: UnavailableError,
        ErrorReason.DRAINING: UnavailableError,
        ErrorReason.WAIT_TIMEOUT: WaitTimeoutError,
        ErrorReason.SNAPSHOT_GONE: SnapshotGoneError,
        ErrorReason.CUT_FAILED: SnapshotError,
        ErrorReason.DATA_ORDER_MISMATCH: DataOrderError,
        ErrorReason.LIMIT_EXCEEDED: LimitError,
        ErrorReason.UNSUPPORTED: UnsupportedError,
        ErrorReason.JOB_ENDED: JobEndedError,
        ErrorReason.OPTIMIZER_OUT_OF_PHASE: OptimizerMismatchError,
        ErrorReason.SEGMENT_GONE: UnavailableError,
        ErrorReason.STATE_NOT_WRITTEN: UnavailableError,
        ErrorReason.MEMORY_EXCEEDED: LimitError,
        ErrorReason.CHECKPOINT_FAILED: SnapshotError,
        ErrorReason.UNAUTHENTICATED: AuthenticationError,
        ErrorReason.CREDENTIAL_ENDED: AuthenticationError,
        ErrorReason.PERMISSION_DENIED: PermissionDeniedError,
        ErrorReason.BUSY: UnavailableError,
        ErrorReason.PRIVACY_BUDGET_SPENT: PrivacyBudgetError,
    }
)
"""Class of every reason that a server may give."""


def error_of_refusal(refusal: Refusal) -> PsError:
    """The exception for a server's refusal, with what to do next in its text."""
    text = refusal.message if refusal.cure in refusal.message else refusal.text
    return ERROR_CLASSES[refusal.reason](
        text, reason=refusal.reason, facts=refusal.facts
    )
