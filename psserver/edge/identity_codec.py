"""Parts of messages that both services read: identities, versions, data ranges."""

from collections.abc import Collection

from pswire.leased_data import DataRange
from pswire.limits import NAME_BYTES_MAX, PROTOCOL_VERSION
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import membership_pb2, push_pb2

RANGE_COUNT_MAX = 65_536
"""Data ranges of one call: 4 MiB of empty ones would take 200 MiB here."""


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


def range_message(piece: DataRange) -> push_pb2.DataRange:
    """Writes a data range."""
    return push_pb2.DataRange(
        loader=piece.loader, epoch=piece.epoch, start=piece.start, stop=piece.stop
    )


def read_ranges(
    ranges: Collection[push_pb2.DataRange],
) -> tuple[DataRange, ...]:
    """Reads data ranges.

    Raises:
        Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`.
    """
    if len(ranges) > RANGE_COUNT_MAX:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"{len(ranges)} data ranges in one call, the limit is {RANGE_COUNT_MAX}",
        )
    found = tuple(
        DataRange(piece.loader, piece.epoch, piece.start, piece.stop)
        for piece in ranges
    )
    for piece in found:
        if not 0 <= piece.start <= piece.stop or piece.epoch < 0:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"data range [{piece.start}, {piece.stop}) of epoch {piece.epoch} is "
                "none",
            )
    return found
