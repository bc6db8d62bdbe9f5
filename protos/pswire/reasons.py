"""Why a call is refused: the one catalogue of errors.

Pure: no gRPC, no protobuf. `error_details` carries a `Refusal` over the wire, and
psworker maps each reason to an exception class. Tests hold the enum here against
`v1/error.proto`, and the catalogue against the enum.

Status codes that gRPC itself never generates (INVALID_ARGUMENT, NOT_FOUND,
ALREADY_EXISTS, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, DATA_LOSS) mean that the
server decided and nothing changed. Any other leaves the outcome unknown, but for the
`ACCESS_REFUSALS`, which are known by their details.
Source: https://grpc.github.io/grpc/core/md_doc_statuscodes.html
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final


class ErrorReason(IntEnum):
    """Mirrors `pswire.v1.ErrorReason`, without the prefix."""

    INTERNAL = 1
    MALFORMED_MESSAGE = 2
    PROTOCOL_VERSION = 3
    JOB_UNKNOWN = 4
    SCHEMA_MISMATCH = 5
    OPTIMIZER_UNSUPPORTED = 6
    OPTIMIZER_MISMATCH = 7
    HYPERPARAMETER_INVALID = 8
    WORKER_UNKNOWN = 9
    WORKER_ID_TAKEN = 10
    WORKER_INCARNATION_STALE = 11
    SHARD_INCARNATION_STALE = 12
    SHARD_UNKNOWN = 13
    SHARD_LOST = 14
    SEQUENCE_GAP = 15
    PUSH_CONFLICT = 16
    CHUNK_INVALID = 17
    CHUNK_DIGEST_MISMATCH = 18
    NOT_STARTED = 19
    RECOVERING = 20
    DRAINING = 21
    WAIT_TIMEOUT = 22
    SNAPSHOT_GONE = 23
    CUT_FAILED = 24
    DATA_ORDER_MISMATCH = 25
    LIMIT_EXCEEDED = 26
    UNSUPPORTED = 27
    JOB_ENDED = 28
    OPTIMIZER_OUT_OF_PHASE = 29
    SEGMENT_GONE = 30
    STATE_NOT_WRITTEN = 31
    MEMORY_EXCEEDED = 32
    CHECKPOINT_FAILED = 33
    UNAUTHENTICATED = 40
    CREDENTIAL_ENDED = 41
    PERMISSION_DENIED = 42
    BUSY = 45
    PRIVACY_BUDGET_SPENT = 50


@dataclass(frozen=True, slots=True)
class ErrorCase:
    """What follows from a reason.

    Attributes:
        status: Name of the gRPC status code.
        retryable: Whether the same call may succeed later without any change.
        cure: What to do next, for a person; ends the text of an error.
    """

    status: str
    retryable: bool
    cure: str


CATALOGUE: Final[Mapping[ErrorReason, ErrorCase]] = MappingProxyType(
    {
        ErrorReason.INTERNAL: ErrorCase(
            "INTERNAL", False, "look into the server's log; please report it as a bug"
        ),
        ErrorReason.MALFORMED_MESSAGE: ErrorCase(
            "INVALID_ARGUMENT", False, "use the psworker of the same release"
        ),
        ErrorReason.PROTOCOL_VERSION: ErrorCase(
            "FAILED_PRECONDITION", False, "install the same release on both sides"
        ),
        ErrorReason.JOB_UNKNOWN: ErrorCase(
            "NOT_FOUND", False, "connect again; the server runs another job now"
        ),
        ErrorReason.SCHEMA_MISMATCH: ErrorCase(
            "FAILED_PRECONDITION", False, "build the same model on every worker"
        ),
        ErrorReason.OPTIMIZER_UNSUPPORTED: ErrorCase(
            "INVALID_ARGUMENT", False, "use one of the optimizers that are listed"
        ),
        ErrorReason.OPTIMIZER_MISMATCH: ErrorCase(
            "FAILED_PRECONDITION",
            False,
            "build the same optimizer on every worker, and prepare it alike",
        ),
        ErrorReason.HYPERPARAMETER_INVALID: ErrorCase(
            "INVALID_ARGUMENT", False, "correct the value in the parameter group"
        ),
        ErrorReason.WORKER_UNKNOWN: ErrorCase(
            "NOT_FOUND", False, "connect again to get an identity"
        ),
        ErrorReason.WORKER_ID_TAKEN: ErrorCase(
            "ALREADY_EXISTS", True, "choose another worker id, or stop the other one"
        ),
        ErrorReason.WORKER_INCARNATION_STALE: ErrorCase(
            "ABORTED", False, "connect again; this start of the worker is closed"
        ),
        ErrorReason.SHARD_INCARNATION_STALE: ErrorCase(
            "ABORTED", True, "wait: the coordinator says how the job goes on"
        ),
        ErrorReason.SHARD_UNKNOWN: ErrorCase(
            "FAILED_PRECONDITION", False, "start as many shards as --shards says"
        ),
        ErrorReason.SHARD_LOST: ErrorCase(
            "FAILED_PRECONDITION",
            False,
            "look into the shard's log; with --checkpoint-dir start all again by the "
            "same command lines, else a new job",
        ),
        ErrorReason.SEQUENCE_GAP: ErrorCase(
            "OUT_OF_RANGE", False, "ask GetSession which push is the next"
        ),
        ErrorReason.PUSH_CONFLICT: ErrorCase(
            "INVALID_ARGUMENT", False, "a push may only be sent again unchanged"
        ),
        ErrorReason.CHUNK_INVALID: ErrorCase(
            "INVALID_ARGUMENT", False, "use the psworker of the same release"
        ),
        ErrorReason.CHUNK_DIGEST_MISMATCH: ErrorCase(
            "DATA_LOSS", True, "send it again; if it recurs, check memory and network"
        ),
        ErrorReason.NOT_STARTED: ErrorCase(
            "FAILED_PRECONDITION", True, "start the processes that are missing"
        ),
        ErrorReason.RECOVERING: ErrorCase(
            "UNAVAILABLE", True, "wait: the shard will take calls when it has a record"
        ),
        ErrorReason.DRAINING: ErrorCase(
            "UNAVAILABLE", True, "wait for the process to be started again"
        ),
        ErrorReason.WAIT_TIMEOUT: ErrorCase(
            "DEADLINE_EXCEEDED", True, "look at the processes named above"
        ),
        ErrorReason.SNAPSHOT_GONE: ErrorCase(
            "NOT_FOUND", True, "ask for the latest snapshot again"
        ),
        ErrorReason.CUT_FAILED: ErrorCase(
            "UNAVAILABLE", True, "ask again; training is not affected"
        ),
        ErrorReason.DATA_ORDER_MISMATCH: ErrorCase(
            "FAILED_PRECONDITION",
            False,
            "give every worker the same data set and a sampler that draws from "
            "the generator it is given",
        ),
        ErrorReason.LIMIT_EXCEEDED: ErrorCase(
            "RESOURCE_EXHAUSTED",
            False,
            "stay below the limit, or raise it if it is one of --limit, see "
            "docs/limits.md",
        ),
        ErrorReason.UNSUPPORTED: ErrorCase(
            "UNIMPLEMENTED", False, "see docs/limits.md"
        ),
        ErrorReason.JOB_ENDED: ErrorCase(
            "FAILED_PRECONDITION", False, "start a new coordinator and shards"
        ),
        ErrorReason.OPTIMIZER_OUT_OF_PHASE: ErrorCase(
            "FAILED_PRECONDITION",
            False,
            "step the same optimizers in the same order on every worker",
        ),
        ErrorReason.SEGMENT_GONE: ErrorCase(
            "ABORTED", True, "send the chunk in a message"
        ),
        ErrorReason.MEMORY_EXCEEDED: ErrorCase(
            "FAILED_PRECONDITION",
            False,
            "begin a job of more shards, on machines with enough memory in all",
        ),
        ErrorReason.CHECKPOINT_FAILED: ErrorCase(
            "UNAVAILABLE",
            True,
            "look at the folder of --checkpoint-dir, which the coordinator and all "
            "shards write to; training goes on, and another one is tried soon",
        ),
        ErrorReason.UNAUTHENTICATED: ErrorCase(
            "UNAUTHENTICATED",
            False,
            "name a file with a token by --token-file or PS_TOKEN_FILE (`psctl token "
            "create` makes one), or a certificate by PS_TLS_CERT and PS_TLS_KEY",
        ),
        ErrorReason.CREDENTIAL_ENDED: ErrorCase(
            "UNAUTHENTICATED",
            True,
            "replace the token in the file of PS_TOKEN_FILE, which the next call reads",
        ),
        ErrorReason.PERMISSION_DENIED: ErrorCase(
            "PERMISSION_DENIED",
            False,
            "use a credential that was made for this, see docs/security.md",
        ),
        ErrorReason.BUSY: ErrorCase(
            "RESOURCE_EXHAUSTED",
            True,
            "ask again in a moment: nothing was changed; if it lasts, look at what "
            "calls this process, or raise its --limit",
        ),
        ErrorReason.PRIVACY_BUDGET_SPENT: ErrorCase(
            "FAILED_PRECONDITION",
            False,
            "end training here: a further step would promise less than was asked for",
        ),
        ErrorReason.STATE_NOT_WRITTEN: ErrorCase(
            "UNAVAILABLE",
            True,
            "make room on the disk of the coordinator's --state-dir: nothing was "
            "changed, and the same call succeeds then",
        ),
    }
)


ACCESS_REFUSALS: Final = frozenset(
    {ErrorReason.UNAUTHENTICATED, ErrorReason.PERMISSION_DENIED}
)
"""Reasons for which the server did nothing, though gRPC might make up their status."""


class Refusal(Exception):
    """A call that is refused; raised with no state changed.

    Attributes:
        reason: Why, for programs.
        message: What happened and why, for a person, without the cure.
        cure: What to do next.
        facts: Values behind the message.
    """

    def __init__(
        self, reason: ErrorReason, message: str, *, cure: str = "", **facts: object
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.cure = cure or CATALOGUE[reason].cure
        self.facts = {key: str(value) for key, value in facts.items()}

    @property
    def text(self) -> str:
        """What happened, why, and what to do next."""
        return f"{self.message}; {self.cure}"
