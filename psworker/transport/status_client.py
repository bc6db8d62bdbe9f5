"""Asks for the state of a job and for changes of it, for psctl. Without torch."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from pswire.channels import ChannelKind, aio_channel
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import ModeTerms
from pswire.span_log import Span
from pswire.status_document import (
    Document,
    event_document,
    history_document,
    status_document,
)
from pswire.v1 import coordinator_service_pb2 as pb
from pswire.v1 import membership_pb2
from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from psworker.transport.calls import CallError, calling, translated

if TYPE_CHECKING:
    from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceAsyncStub

ANSWER_MARGIN_S: Final = 2.0
"""What a call's deadline leaves the coordinator above its own wait, to say why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is complete; `url` is without the password of its own."""

    url: str
    name: str
    version: int
    clock: int
    byte_count: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class CheckpointReturn:
    """What a return to a checkpoint means.

    Attributes:
        saved: The checkpoint.
        lost_step_count: Steps of all workers that are trained again.
        undone: Names of checkpoints that do not count any more.
    """

    saved: SavedCheckpoint
    lost_step_count: int
    undone: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModeChange:
    """The record that changed the mode: its generation, and after which clock."""

    generation: int
    mode_clock: int


async def fetch_document(address: str, *, timeout_s: float) -> Document:
    """Asks the coordinator where its job stands.

    Raises:
        CallError: It gave no answer, or refused.
        Refusal: The answer can't be read.
    """
    async with _coordinator(address) as stub:
        response = await stub.GetStatus(
            pb.GetStatusRequest(protocol_version=PROTOCOL_VERSION), timeout=timeout_s
        )
    return status_document(response, address)


async def poll_documents(
    address: str, *, interval_s: float, timeout_s: float
) -> AsyncGenerator[Document | CallError]:
    """Asks again and again on one connection; what it yields may be a failure."""
    async with aio_channel(address, ChannelKind.CONTROL) as channel:
        stub = cast("CoordinatorServiceAsyncStub", CoordinatorServiceStub(channel))
        request = pb.GetStatusRequest(protocol_version=PROTOCOL_VERSION)
        while True:
            try:
                with translated(f"the coordinator at {address}"):
                    response = await stub.GetStatus(request, timeout=timeout_s)
                    document = status_document(response, address)
            except CallError as error:
                yield error
            else:
                yield document
            await asyncio.sleep(interval_s)


async def fetch_history(address: str, *, timeout_s: float) -> Document:
    """Asks how the job has trained over time.

    Raises:
        CallError: It gave no answer, or refused.
    """
    async with _coordinator(address) as stub:
        response = await stub.GetHistory(
            pb.GetHistoryRequest(protocol_version=PROTOCOL_VERSION), timeout=timeout_s
        )
    return history_document(response)


async def watch_events(
    address: str, *, after: int, follow: bool
) -> AsyncGenerator[Document]:
    """Yields what has happened to a job after an event.

    Args:
        address: Of the coordinator.
        after: Number of the last event that is known, 0 for none.
        follow: Whether to go on with what happens.

    Raises:
        CallError: It gave no answer, refused, or answers no more.
    """
    request = pb.WatchEventsRequest(
        protocol_version=PROTOCOL_VERSION, after=after, follow=follow
    )
    async with (
        aio_channel(address, ChannelKind.CONTROL) as channel,
        calling(
            f"the coordinator at {address}",
            lambda: cast(
                "CoordinatorServiceAsyncStub", CoordinatorServiceStub(channel)
            ).WatchEvents(request),
        ) as call,
    ):
        async for message in call:
            for event in message.events:
                yield event_document(event)


async def change_mode(
    address: str, terms: ModeTerms, *, timeout_s: float
) -> ModeChange:
    """Changes the mode of a running job; returns when the record is written.

    Args:
        address: Of the coordinator.
        terms: The new mode.
        timeout_s: Longest wait for the record.

    Raises:
        CallError: It gave no answer, or refused.
    """
    async with _coordinator(address) as stub:
        response = await stub.SetMode(
            pb.SetModeRequest(
                protocol_version=PROTOCOL_VERSION,
                mode=membership_pb2.Mode.ValueType(terms.mode),
                staleness_bound=terms.staleness_bound,
                quorum=terms.quorum,
                grace_window_ms=terms.grace_window_ms,
                timeout_ms=round(timeout_s * 1000),
            ),
            timeout=timeout_s + ANSWER_MARGIN_S,
        )
    return ModeChange(response.generation, response.mode_clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProcess:
    """What one process has done in some steps.

    Attributes:
        name: Of the process, such as `worker w0` or `shard 1`.
        spans: In microseconds since 1970, by the coordinator's clock.
        clock_error_us: By how much they may be wrong there; None if it is not known.
        is_complete: Whether all steps are there.
        left_out_count: Spans that there was no room for.
    """

    name: str
    spans: tuple[Span, ...]
    clock_error_us: int | None
    is_complete: bool
    left_out_count: int


async def record_trace(
    address: str, step_count: int, *, timeout_s: float
) -> list[RecordedProcess]:
    """Has all workers and shards record their next steps; what each has recorded.

    Raises:
        CallError: It gave no answer, or refused.
    """
    request = pb.RecordTraceRequest(
        protocol_version=PROTOCOL_VERSION,
        step_count=step_count,
        timeout_ms=round(timeout_s * 1000),
    )
    deadline_s = timeout_s + ANSWER_MARGIN_S
    async with _coordinator(address) as stub:
        answer = await stub.RecordTrace(request, timeout=deadline_s)
    offset_us = answer.unix_offset_us
    return [_recorded_of(each, offset_us) for each in answer.processes]


def _recorded_of(process: pb.ProcessTrace, offset_us: int) -> RecordedProcess:
    recorded = process.recorded
    offset_us += recorded.clock_offset_us
    return RecordedProcess(
        name=process.name,
        spans=tuple(
            Span(
                kind=each.kind,
                begin_us=each.begin_us + offset_us,
                end_us=each.begin_us + each.duration_us + offset_us,
                step=each.step,
                lane=each.lane,
            )
            for each in recorded.spans
        ),
        clock_error_us=None if recorded.clock_error_us < 0 else recorded.clock_error_us,
        is_complete=recorded.is_complete,
        left_out_count=recorded.left_out_count,
    )


async def save_checkpoint(address: str, *, timeout_s: float) -> SavedCheckpoint:
    """Has a checkpoint made; returns when it is complete.

    Args:
        address: Of the coordinator.
        timeout_s: Longest wait for it.

    Raises:
        CallError: It gave no answer, or refused.
    """
    async with _coordinator(address) as stub:
        response = await stub.SaveCheckpoint(
            pb.SaveCheckpointRequest(
                protocol_version=PROTOCOL_VERSION,
                timeout_ms=round(timeout_s * 1000),
            ),
            timeout=timeout_s + ANSWER_MARGIN_S,
        )
    return _saved_of(response.saved)


async def restore_checkpoint(
    address: str, name: str, *, tries_only: bool, timeout_s: float
) -> CheckpointReturn:
    """Has a job return to a checkpoint, or asks what that would mean.

    Args:
        address: Of the coordinator.
        name: Which one; empty for the newest good one.
        tries_only: Whether nothing is to change.
        timeout_s: Longest wait.

    Raises:
        CallError: It gave no answer, or refused.
    """
    async with _coordinator(address) as stub:
        response = await stub.RestoreCheckpoint(
            pb.RestoreCheckpointRequest(
                protocol_version=PROTOCOL_VERSION,
                name=name,
                tries_only=tries_only,
                timeout_ms=round(timeout_s * 1000),
            ),
            timeout=timeout_s + ANSWER_MARGIN_S,
        )
    return CheckpointReturn(
        _saved_of(response.saved), response.lost_step_count, tuple(response.undone)
    )


@asynccontextmanager
async def _coordinator(address: str) -> AsyncIterator["CoordinatorServiceAsyncStub"]:
    """Calls to a coordinator, whose errors become `CallError`."""
    async with aio_channel(address, ChannelKind.CONTROL) as channel:
        with translated(f"the coordinator at {address}"):
            yield cast("CoordinatorServiceAsyncStub", CoordinatorServiceStub(channel))


def _saved_of(message: pb.SavedCheckpoint) -> SavedCheckpoint:
    return SavedCheckpoint(
        url=message.place.url,
        name=message.place.name,
        version=message.version,
        clock=message.clock,
        byte_count=message.byte_count,
        age_ms=message.age_ms,
    )
