"""Parts of messages that both services read: identities, versions, data ranges."""

from pswire.limits import NAME_BYTES_MAX, PROTOCOL_VERSION
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import membership_pb2


def worker_key(identity: membership_pb2.WorkerIdentity) -> WorkerKey:
    """Reads an identity.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    size = len(identity.worker_id.encode())
    if not 0 < size <= NAME_BYTES_MAX or identity.incarnation < 1:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"worker {identity.worker_id[:64]!r}, incarnation "
            f"{identity.incarnation}, is no identity",
        )
    return WorkerKey(identity.worker_id, identity.incarnation)


def check_protocol(version: int) -> None:
    """Refuses another protocol version.

    Raises:
        Refusal: `PROTOCOL_VERSION`.
    """
    if version != PROTOCOL_VERSION:
        raise Refusal(
            ErrorReason.PROTOCOL_VERSION,
            f"the caller speaks protocol {version}, this server speaks "
            f"{PROTOCOL_VERSION}",
        )
