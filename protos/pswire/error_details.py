"""A `Refusal` over the wire: as the details of a `google.rpc.Status`, and back.

A server aborts with `status_code(reason)`, `details_text(refusal)` and
`trailing_metadata(refusal)`. The details are in the standard place, so that any gRPC
client can read them.

gRPC refuses metadata of more than 8 KB in all, and a person reads no more either: long
texts lose their middle here.
Source: https://grpc.io/docs/guides/error and google/rpc/status.proto
"""

from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import status_pb2  # type: ignore[import-untyped]  # has no stubs

from pswire.reasons import ACCESS_REFUSALS, CATALOGUE, ErrorReason, Refusal
from pswire.security.tls_problem import cause_of
from pswire.v1 import error_pb2

DETAILS_KEY: Final = "grpc-status-details-bin"
"""Metadata key that gRPC's libraries agree on for a `google.rpc.Status`."""

PUSHBACK: Final = ("grpc-retry-pushback-ms", b"500")
"""Tells gRPC's own retries, of clients that have them on, when to ask again.
Source: https://github.com/grpc/proposal/blob/master/A6-client-retries.md"""

STATUS_BYTES_MAX: Final = 6_000
"""Encoded status. With the text and gRPC's own entries it stays below 8 KB."""

TEXT_BYTES_MAX: Final = 1_200
"""Text of the status as gRPC sends it, percent-encoded."""

_MESSAGE_BYTES_MAX: Final = 3_400
_CURE_BYTES_MAX: Final = 400
_FACT_BYTES_MAX: Final = 100
_FACT_COUNT_MAX: Final = 6

DECIDED_CODES: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Codes that gRPC never makes up: the server decided, and nothing changed."""


def status_code(reason: ErrorReason) -> grpc.StatusCode:
    """Status of a reason, from the catalogue."""
    return grpc.StatusCode[CATALOGUE[reason].status]


def is_decided(code: grpc.StatusCode, refusal: Refusal | None = None) -> bool:
    """Whether a call that ended so was refused with no state changed.

    Any other code but OK leaves the outcome unknown: ask, then send again. That the
    caller may not call is known by the details alone: gRPC makes such codes up, too.
    """
    return code in DECIDED_CODES or (
        refusal is not None and refusal.reason in ACCESS_REFUSALS
    )


def details_text(refusal: Refusal) -> str:
    """The text to abort a call with: `refusal.text`, cut to what gRPC carries."""
    cure = refusal.text.removeprefix(refusal.message)
    room = TEXT_BYTES_MAX - _percent_encoded_size(cure)
    return _shortened(refusal.message, room, _percent_encoded_size) + cure


def plain_details(text: str) -> str:
    """What gRPC says of a call that has failed, in words that users know."""
    if text == "Cancelling all calls":  # a gRPC server that stops, to those it serves
        return "the daemon there was stopped"
    return cause_of(text) or text


def trailing_metadata(refusal: Refusal) -> tuple[tuple[str, bytes], ...]:
    """Metadata to abort a call with, at most `STATUS_BYTES_MAX` of it."""
    detail = error_pb2.ErrorDetail(
        reason=error_pb2.ErrorReason.ValueType(refusal.reason),
        message=_shortened(refusal.message, _MESSAGE_BYTES_MAX, _utf8_size),
        retryable=CATALOGUE[refusal.reason].retryable,
        cure=(
            ""
            if refusal.cure == CATALOGUE[refusal.reason].cure
            else _shortened(refusal.cure, _CURE_BYTES_MAX, _utf8_size)
        ),
        facts={
            _shortened(key, _FACT_BYTES_MAX, _utf8_size): _shortened(
                value, _FACT_BYTES_MAX, _utf8_size
            )
            for key, value in list(refusal.facts.items())[:_FACT_COUNT_MAX]
        },
    )
    packed = any_pb2.Any()
    packed.Pack(detail)
    code: int = status_code(refusal.reason).value[0]
    status = status_pb2.Status(
        code=code, message=details_text(refusal), details=[packed]
    )
    details = (DETAILS_KEY, status.SerializeToString())
    if refusal.reason is ErrorReason.BUSY:
        return (details, PUSHBACK)
    return (details,)


def refusal_from_rpc_error(error: grpc.RpcError) -> Refusal | None:
    """Reads the refusal that a failed call carries.

    Returns:
        None when there is none: the error is gRPC's own, from another program, or of a
        reason that this release does not know. Its status code then says all.
    """
    trailing = getattr(error, "trailing_metadata", None)
    for key, value in (trailing() if trailing is not None else None) or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return _refusal_from_status(value)
    return None


def _refusal_from_status(encoded: bytes) -> Refusal | None:
    detail = error_pb2.ErrorDetail()
    try:
        status = status_pb2.Status.FromString(encoded)
        if not any(packed.Unpack(detail) for packed in status.details):
            return None
        reason = ErrorReason(detail.reason)
    except (DecodeError, ValueError):
        return None
    refusal = Refusal(reason, detail.message, cure=detail.cure)
    refusal.facts = dict(detail.facts)
    return refusal


def _shortened(text: str, size_max: int, size_of: Callable[[str], int]) -> str:
    """Cuts long lines in their middle, then leaves out lines before the last."""
    text = text.encode("utf-8", "replace").decode()
    if size_of(text) <= size_max:
        return text
    *lines, last = text.split("\n")
    line_size_max = size_max // 3
    # A line takes a byte at least, so more than this are never kept.
    head = [_cut_line(line, line_size_max, size_of) for line in lines[:size_max]]
    last = _cut_line(last, line_size_max, size_of)
    while True:
        left_out_count = len(lines) - len(head)
        left_out = [f"... and {left_out_count} more"] if left_out_count else []
        shortened = "\n".join([*head, *left_out, last])
        if size_of(shortened) <= size_max or not head:
            return shortened
        del head[-max(1, len(head) // 8) :]


def _cut_line(line: str, size_max: int, size_of: Callable[[str], int]) -> str:
    if size_of(line) <= size_max:
        return line
    kept = min(len(line), size_max)
    while size_of(line[: kept // 2] + " ... " + line[-(kept // 2) :]) > size_max:
        kept -= max(2, kept // 8)
    return line[: kept // 2] + " ... " + line[-(kept // 2) :]


def _utf8_size(text: str) -> int:
    return len(text.encode())


def _percent_encoded_size(text: str) -> int:
    plain = sum(0x20 <= byte <= 0x7E and byte != 0x25 for byte in text.encode())
    return 3 * _utf8_size(text) - 2 * plain
