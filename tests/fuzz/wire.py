"""Readers of what other processes of a job send: requests, answers, chunks."""

from collections.abc import Callable, Coroutine
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeVar

import grpc
import torch
from google.protobuf.message import DecodeError, Message

from psserver.edge.cut_codec import (
    cut_request,
    part_request,
    read_cut_report,
    read_part_report,
)
from psserver.edge.decoding import decode, worker_key
from psserver.edge.fence_codec import fence_request, read_fence_report
from psserver.shard.rpc.push_codec import (
    PushFields,
    check_frame,
    check_window,
    push_id,
    worker_choice,
)
from pswire.compression import Compression
from pswire.encodings.change import unpack_change
from pswire.encodings.known import ENCODINGS
from pswire.error_details import (
    DETAILS_KEY,
    STATUS_BYTES_MAX,
    refusal_from_rpc_error,
    trailing_metadata,
)
from pswire.frames import (
    ENCODING_RAW,
    REQUEST_CHUNK_FIELD,
    ChunkFrame,
    bits_from_bytes,
    bits_to_bytes,
    decode_chunk,
    encode_chunk,
    encode_shared_chunk,
    split_fields,
)
from pswire.membership_codec import (
    choice_message,
    epoch_message,
    read_epoch,
    read_ranges,
    read_record,
    read_report,
    read_settings,
    read_split,
    record_message,
    report_fields,
    settings_message,
    split_message,
)
from pswire.optimizer_states import decode_state, encode_state
from pswire.placement import place
from pswire.reasons import Refusal
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from pswire.schema_codec import (
    MergedModel,
    cut_model,
    optimizer_from_message,
    optimizer_to_message,
    read_terms,
    terms_fields,
)
from pswire.shared_memory.segments import GradientLayout
from pswire.slice_rows import pack_rows, unpack_rows
from pswire.status_document import status_document
from pswire.torch_types import buffer_of
from pswire.v1 import coordinator_service_pb2 as control
from pswire.v1 import membership_pb2, parameter_service_pb2, push_pb2
from psworker.snapshots.snapshot_image import SnapshotImage
from psworker.tensors.value_store import ValueStore
from psworker.transport.messages import (
    reply_of,
    session_of,
    settings_used_of,
    snapshot_of,
    watch_event_of,
)
from tests.fuzz.target import Target, same, taken

Read = Callable[[Any], Any]
Write = Callable[[Any], Message]
Result = TypeVar("Result")

SCHEMA: Final = ModelSchema(
    (
        SchemaEntry(name="table", shape=(9, 4), element_type=ElementType.FLOAT32),
        SchemaEntry(name="bias", shape=(5,), element_type=ElementType.FLOAT32),
    )
)
PLACEMENT: Final = place(SCHEMA, 1)
_ROW_LENGTHS: Final = (4, 1)

REFUSED: Final = (Refusal,)
ANSWERS: Final = (Refusal, DecodeError)
"""An answer is parsed by gRPC, which makes a failed call of what it can't parse."""


def _request(
    name: str, kind: type[Message], read: Read, write: Write | None = None
) -> Target:
    """A request, which a server reads."""

    def take(data: bytes) -> None:
        value = read(decode(kind, data))
        if write is not None:
            with taken():
                written = write(value).SerializeToString()
                assert same(read(decode(kind, written)), value)

    return Target(name, take, REFUSED)


def _answer(
    name: str, kind: type[Message], read: Read, write: Write | None = None
) -> Target:
    """An answer, which a worker, a shard or a tool reads."""

    def take(data: bytes) -> None:
        value = read(kind.FromString(data))
        if write is not None:
            with taken():
                again = kind.FromString(write(value).SerializeToString())
                assert same(read(again), value)

    return Target(name, take, ANSWERS)


def _result(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What a coroutine returns that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    raise AssertionError("it waits")


def _take_chunks(data: bytes) -> None:
    """All length-delimited fields as chunks, beside what the generated code reads."""
    for _, view in split_fields(data):
        frame = decode_chunk(view)
        with taken():
            known = push_pb2.GradientChunk.FromString(bytes(view))
            assert (frame.index, frame.part, frame.last, frame.digest) == (
                *(known.index, known.part, known.last, known.digest),
            )
            assert frame.presence == known.presence
            assert frame.encoding == known.encoding
            assert (bytes(frame.row_indices), bytes(frame.data)) == (
                *(known.row_indices, known.data),
            )
            ((_, again),) = split_fields(_chunk_message(frame))
            assert decode_chunk(again) == frame


def _chunk_message(frame: ChunkFrame) -> bytes:
    if frame.shared is not None:
        whole = encode_shared_chunk(
            index=frame.index,
            presence=frame.presence,
            digest=frame.digest,
            shared=frame.shared,
        )
        ((_, view),) = split_fields(whole)
        # A chunk in shared memory has neither parts nor, here, an end that is not its.
        given = (frame.part, frame.last)
        return whole if given == (0, True) else _with_part(view, frame)
    return encode_chunk(
        REQUEST_CHUNK_FIELD,
        index=frame.index,
        presence=frame.presence,
        data=frame.data,
        part=frame.part,
        last=frame.last,
        encoding=frame.encoding,
        row_indices=bytes(frame.row_indices),
        digest=frame.digest,
    )


def _with_part(view: memoryview, frame: ChunkFrame) -> bytes:
    chunk = push_pb2.GradientChunk.FromString(bytes(view))
    chunk.part, chunk.last = frame.part, frame.last
    return parameter_service_pb2.PushPullRequest(chunk=chunk).SerializeToString()


def _take_push(data: bytes) -> None:
    """A message of a push, as far as it goes without a shard."""
    fields = PushFields(data)
    if fields.is_whole:
        header = _result(fields.header())
        check_window(header)
        push_id(header.worker, header.sequence)
    message = _result(fields.message())
    if message.trailer is not None:
        read_ranges(message.trailer.ranges)
    layout = GradientLayout.of(PLACEMENT, 0)
    for frame in message.chunks:
        check_frame(frame)
        if frame.shared is not None:
            layout.run(frame.index, frame.shared.length)


def _take_bits(data: bytes) -> None:
    count, packed = int.from_bytes(data[:2], "little"), data[2:]
    bits = bits_from_bytes(packed, count)
    with taken():
        assert bits_to_bytes(bits) == packed


def _take_rows(data: bytes) -> None:
    (chunk,) = PLACEMENT.chunks
    presence = tuple(bool(data[:1] and data[0] >> bit & 1) for bit in range(2))
    rows = unpack_rows(data[1:], chunk, presence, _ROW_LENGTHS)
    with taken():
        present = [each for each, there in zip(rows, presence, strict=True) if there]
        assert pack_rows(present) == data[1:]
        for each in present:
            if each is not None:
                places = each.positions()
                assert len(places) == each.element_count
                assert all(low < high for low, high in pairwise(places.tolist()))
                assert not len(places) or (
                    places[0] >= 0 and places[-1] < each.piece.element_count
                )


def _take_encoded(data: bytes) -> None:
    """A chunk of so many elements, by each encoding."""
    encodings = list(ENCODINGS.values())
    encoding = encodings[(data[0] if data else 0) % len(encodings)]
    count, encoded = int.from_bytes(data[1:3], "little"), memoryview(data[3:])
    codec = encoding.codec()
    codec.check(encoded, count)
    with taken():
        decoded = codec.decode(encoded, count)
        assert (decoded.dtype, decoded.shape) == (torch.float32, (count,))
        held = torch.zeros(count)
        codec.add_to(held, encoded)
        assert torch.equal(held, decoded) or not decoded.isfinite().all()


def _take_snapshot_chunks(data: bytes) -> None:
    image = SnapshotImage(SCHEMA, 1)
    for _, view in split_fields(data):
        image.add(0, decode_chunk(view))
    image.check_complete(0)
    with taken():
        message = encode_chunk(
            REQUEST_CHUNK_FIELD,
            index=0,
            presence=b"\3",
            encoding=ENCODING_RAW,
            data=buffer_of(torch.cat([each.reshape(-1) for each in image.tensors()])),
        )
        again = SnapshotImage(SCHEMA, 1)
        ((_, view),) = split_fields(message)
        again.add(0, decode_chunk(view))
        assert same(again.tensors(), image.tensors())


def _take_values(data: bytes) -> None:
    """Values that a shard sends, as a worker writes them into its model."""
    tensors = [torch.zeros(entry.shape) for entry in SCHEMA.entries]
    store = ValueStore(tensors, PLACEMENT, compression=Compression(pull="int8"))
    for _, view in split_fields(data):
        frame = decode_chunk(view)
        before = [each.numpy().tobytes() for each in tensors]
        try:
            store.write(frame)
        except Refusal:
            after = [each.numpy().tobytes() for each in tensors]
            assert after == before, "refused, and written in part"
            raise


def _take_state(data: bytes) -> None:
    state = decode_state(data)
    with taken():
        for part in encode_state(
            {name: each.contiguous() for name, each in state.items()}
        ):
            for name, tensor in decode_state(part).items():
                assert same(tensor, state[name])


class _Failed(grpc.RpcError):
    """A call that a server has aborted with these details."""

    def __init__(self, details: bytes) -> None:
        super().__init__()
        self._details = details

    def trailing_metadata(self) -> Any:  # noqa: ANN401, of gRPC's own class
        return ((DETAILS_KEY, self._details),)


def _take_details(data: bytes) -> None:
    refusal = refusal_from_rpc_error(_Failed(data))
    if refusal is not None:
        with taken():
            written = dict(trailing_metadata(refusal))[DETAILS_KEY]
            assert isinstance(written, bytes)
            assert len(written) <= STATUS_BYTES_MAX
            again = refusal_from_rpc_error(_Failed(written))
            assert again is not None
            assert again.reason is refusal.reason


def _take_join(data: bytes) -> None:
    """A model in two messages; two bytes say how long the first is."""
    cut = 2 + int.from_bytes(data[:2], "little")
    first, second = data[2:cut], data[cut:]
    merged = MergedModel(decode(control.JoinRequest, first))
    merged.add(decode(control.JoinRequest, second))
    terms = read_terms(merged.message)
    with taken():
        parts = cut_model(control.JoinRequest(**terms_fields(terms)))
        again = MergedModel(next(parts))
        for part in parts:
            again.add(part)
        assert same(read_terms(again.message), terms)


def _snapshot(message: control.RequestSnapshotResponse) -> object:
    return snapshot_of(MergedModel(message).message)


def _view(event: control.WatchShardResponse) -> object:
    """What a shard's watch brings, without the shard."""
    view = MergedModel(event.view).message
    return read_terms(view), read_record(view.record)


WIRE: Final = (
    Target("chunks", _take_chunks, REFUSED),
    Target("push", _take_push, REFUSED),
    Target("bits", _take_bits, REFUSED),
    Target("rows", _take_rows, REFUSED),
    Target("encodings", _take_encoded, REFUSED),
    Target("change", lambda data: _drop(unpack_change(memoryview(data))), REFUSED),
    Target("snapshot_chunks", _take_snapshot_chunks, REFUSED),
    Target("values", _take_values, REFUSED),
    Target("optimizer_state", _take_state, REFUSED),
    Target("error_details", _take_details, ()),
    Target("join", _take_join, REFUSED),
    _request(
        "optimizer",
        control.DeclareOptimizerRequest,
        lambda message: optimizer_from_message(message.optimizer, SCHEMA),
        lambda spec: control.DeclareOptimizerRequest(
            optimizer=optimizer_to_message(spec)
        ),
    ),
    _request(
        "data_report",
        control.LeaseDataRequest,
        read_report,
        lambda report: control.LeaseDataRequest(**report_fields(report)),
    ),
    _request(
        "fence_report", control.ReportFenceRequest, read_fence_report, fence_request
    ),
    _request("cut_report", control.ReportCutRequest, read_cut_report, cut_request),
    _request(
        "part_report", control.ReportCheckpointRequest, read_part_report, part_request
    ),
    _request(
        "worker_choice", membership_pb2.ClockChoice, worker_choice, choice_message
    ),
    _request("worker_key", membership_pb2.WorkerIdentity, worker_key),
    _answer("split", control.SplitRecord, read_split, split_message),
    _answer("epoch_report", control.EpochAccount, read_epoch, epoch_message),
    _answer("record", membership_pb2.Record, read_record, record_message),
    _answer("settings", membership_pb2.JobSettings, read_settings, settings_message),
    _answer("reply", push_pb2.PushReply, reply_of),
    _answer("session", parameter_service_pb2.GetSessionResponse, session_of),
    _answer("settings_used", parameter_service_pb2.OptimizerSettings, settings_used_of),
    _answer("worker_watch", control.WatchWorkerResponse, watch_event_of),
    _answer("shard_watch", control.WatchShardResponse, _view),
    _answer("snapshot", control.RequestSnapshotResponse, _snapshot),
    _answer(
        "status", control.GetStatusResponse, partial(status_document, coordinator="h:1")
    ),
)


def _drop(_: object) -> None:
    """For a reader of which nothing is written again."""
