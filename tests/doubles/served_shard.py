"""One shard with its service, spoken to in messages but without a network."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from psserver.edge.changes import Changes
from psserver.edge.limits import DEFAULT_LIMITS, Limits
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc.parameter_service import ParameterService
from psserver.shard.tensors.contribution import byte_count_of
from pswire.frames import (
    ENCODING_UNCHANGED,
    REQUEST_CHUNK_FIELD,
    REQUEST_HEADER_FIELD,
    REQUEST_TRAILER_FIELD,
    RESPONSE_CHUNK_FIELD,
    ChunkFrame,
    bits_to_bytes,
    decode_chunk,
    encode_chunk,
    encode_shared_chunk,
    join_fields,
    split_fields,
)
from pswire.job_settings import JobSettings
from pswire.job_terms import JobTerms
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import FenceKind, Member, Mode, Record
from pswire.membership_codec import choice_message, identity_message
from pswire.schema import ElementType, EntryKind, ModelSchema, SchemaEntry
from pswire.shared_memory.segments import SharedRun
from pswire.torch_types import TORCH_DTYPES, buffer_of, tensor_from_buffer
from pswire.v1 import parameter_service_pb2, push_pb2, schema_pb2
from tests.doubles.core_values import chosen_by_first, key, sgd

if TYPE_CHECKING:
    from psserver.edge.guard import Context

# No handler of the data plane looks at it.
NO_CONTEXT: Final = cast("Context", None)

TIMEOUT_S: Final = 30.0
RATE: Final = 0.5

# Each is a chunk of its own, since types differ; the last one never changes.
SMALL: Final = (
    SchemaEntry(name="p0", shape=(4,), element_type=ElementType.FLOAT32),
    SchemaEntry(name="p1", shape=(2,), element_type=ElementType.FLOAT64),
    SchemaEntry(name="steps", shape=(3,), element_type=ElementType.INT64),
)


class ServedShard:
    """Shard 0 of a job of one. A context manager: leaving it ends its threads.

    Attributes:
        host: The shard.
        service: Its data plane.
    """

    def __init__(
        self,
        entries: Sequence[SchemaEntry] = SMALL,
        *,
        limits: Limits = DEFAULT_LIMITS,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        self.host = ShardHost(
            shard_index=0,
            incarnation=1,
            settings=JobSettings(job_id="job", shard_count=1, **settings),
            thread_count=2,
            limits=limits,
        )
        self.service = ParameterService(self.host)
        self._schema = ModelSchema(tuple(entries))
        floats = [
            position
            for position, entry in enumerate(entries)
            if entry.element_type.is_floating and entry.kind is EntryKind.PARAMETER
        ]
        self._optimizer = sgd(groups=(tuple(floats),))

    def __enter__(self) -> "ServedShard":
        return self

    def __exit__(self, *_: object) -> None:
        self.host.close()

    @property
    def terms(self) -> JobTerms:
        """What its job trains."""
        return JobTerms(schema=self._schema, optimizers=(self._optimizer,))

    def start(
        self, names: Sequence[str], *, mode: Mode = Mode.BSP, bound: int = 0
    ) -> Record:
        """Seeds ones, from the first worker, and opens the first clock."""
        host = self.host
        host.adopt(self.terms)
        host.prepare_fence(1, FenceKind.START, key(names[0]))
        for chunk in host.model.chunks:
            dtype = TORCH_DTYPES[chunk.element_type]
            ones = torch.ones(chunk.element_count, dtype=dtype)
            host.model.engine.write_seed(chunk.index, buffer_of(ones))
            host.model.core.seed_chunk_staged(chunk.index)
        host.pump()
        members = [
            Member(worker=key(name), rank=rank, base_clock=0)
            for rank, name in enumerate(names)
        ]
        record = Record(
            fence_number=1,
            generation=1,
            kind=FenceKind.START,
            members=tuple(members),
            mode=mode,
            staleness_bound=bound,
        )
        host.install_record(record)
        return record

    def push(
        self, name: str, sequence: int, gradients: Mapping[int, float] | None = None
    ) -> "OpenPush":
        """A whole push of equal numbers, one for each chunk, at clock `sequence`."""
        gradients = {0: 1.0, 1: 1.0} if gradients is None else gradients
        call = OpenPush(self)
        call.send(self.header(name, sequence) + self.trailer(gradients))
        for chunk_index, value in gradients.items():
            call.send(self.chunk(chunk_index, value))
        return call

    def push_once(self, name: str, sequence: int) -> "OpenPushOnce":
        """A push of ones for the first chunk alone, in one message."""
        return OpenPushOnce(self, self.whole_push(name, sequence))

    def whole_push(self, name: str, sequence: int) -> bytes:
        ones = {0: 1.0}
        parts = self.chunk(0, 1.0), self.header(name, sequence), self.trailer(ones)
        return b"".join(parts)

    def header(self, name: str, sequence: int, **changes: Any) -> bytes:  # noqa: ANN401
        values: dict[str, Any] = {
            **self._target(name),
            "optimizer": "optimizer",
            "sequence": sequence,
            "sequence_unacknowledged_min": sequence,
            "clock": sequence,
        }
        message = push_pb2.PushHeader(**{**values, **changes})
        return join_fields((REQUEST_HEADER_FIELD, message.SerializeToString()))

    def trailer(
        self,
        chunk_indexes: Mapping[int, float] | Sequence[int],
        *,
        weight: float = 1.0,
        **others: Any,  # noqa: ANN401
    ) -> bytes:
        bits = [chunk.index in chunk_indexes for chunk in self.host.model.chunks]
        names = self._optimizer.hyperparameter_names
        rates = [RATE if name == "lr" else 0.0 for name in names]
        message = push_pb2.PushTrailer(
            weight=weight,
            finite=True,
            chunk_bitmap=bits_to_bytes(bits),
            groups=[schema_pb2.GroupHyperparameters(values=rates)],
            **others,
        )
        return join_fields((REQUEST_TRAILER_FIELD, message.SerializeToString()))

    def chunk(self, chunk_index: int, value: float) -> bytes:
        chunk = self.host.model.chunks[chunk_index]
        dtype = TORCH_DTYPES[chunk.element_type]
        data = torch.full((chunk.element_count,), value, dtype=dtype)
        return encode_chunk(
            REQUEST_CHUNK_FIELD,
            index=chunk_index,
            presence=bits_to_bytes((True,) * len(chunk.slices)),
            data=buffer_of(data),
        )

    def shared_chunk(self, chunk_index: int, value: float, segment: int) -> bytes:
        """As `chunk`, in a segment of the worker's."""
        ((_, view),) = split_fields(self.chunk(chunk_index, value))
        frame = decode_chunk(view)
        return encode_shared_chunk(
            index=chunk_index,
            presence=frame.presence,
            digest=frame.digest,
            shared=SharedRun(segment, len(frame.data)),
        )

    def pull(self, name: str, clock: int) -> "OpenPull":
        return OpenPull(self, self.request("Pull", name, clock=clock))

    async def commit(self, name: str, clock: int, contributors: Sequence[str]) -> bool:
        named = choice_message(chosen_by_first(clock, *contributors))
        request = self.request("Commit", name, choice=named)
        return (await self.service.commit(request, NO_CONTEXT)).committed

    async def ready(self, name: str, sequence: int) -> list[str]:
        """Ids of those that were chosen."""
        request = self.request("Ready", name, clock=sequence, sequence=sequence)
        response = await self.service.ready(request, NO_CONTEXT)
        return [worker.worker_id for worker in response.choice.workers]

    async def done_sequence(self, name: str) -> int:
        target = self._target(name)
        del target["generation"]
        request = parameter_service_pb2.GetSessionRequest(**target)
        response = await self.service.get_session(request, NO_CONTEXT)
        return response.sequence_done_max

    @property
    def ahead_bytes(self) -> int:
        """Bytes of chunks whose trailers are still to come."""
        return sum(
            byte_count_of(chunk.payload)
            for member in self.host.members
            if member.ahead is not None
            for chunk in member.ahead.chunks.values()
        )

    async def until(self, *conditions: Any) -> None:  # noqa: ANN401
        for condition in conditions:
            assert await self.host.changes.wait_until(condition, TIMEOUT_S)

    def request(self, method: str, name: str, **fields: Any) -> Any:  # noqa: ANN401
        kind = getattr(parameter_service_pb2, f"{method}Request")
        return kind(**self._target(name), **fields)

    def _target(self, name: str) -> dict[str, Any]:
        return {
            "protocol_version": PROTOCOL_VERSION,
            "job_id": "job",
            "worker": identity_message(key(name)),
            "shard_incarnation": 1,
            "generation": 1,
        }


class _Open:
    """A call under way, and what it has brought.

    Attributes:
        values: Index and value of each chunk that has come, but for those that the
            worker has already.
        waiting: What the call was told that it waits for.
        staged: Clock and contributors, as told.
        reply: The answer, once it is there.
        is_read: Cleared for a reader that is slow.
    """

    def __init__(self, shard: ServedShard) -> None:
        self.is_read = asyncio.Event()
        self.is_read.set()
        self._shard = shard
        self.values: list[tuple[int, float]] = []
        self.waiting: list[push_pb2.Waiting] = []
        self.staged: list[tuple[int, list[str]]] = []
        self.reply: push_pb2.PushReply | None = None
        self._news = Changes()

    def _begin(self, responses: AsyncIterator[bytes]) -> None:
        self.task = asyncio.create_task(self._read(responses))

    async def finished(self) -> push_pb2.PushReply:
        """The reply, once the call has ended.

        Raises:
            Refusal: It was refused.
        """
        async with asyncio.timeout(TIMEOUT_S):
            await self.task
        assert self.reply is not None
        return self.reply

    async def until_values(self, count: int) -> None:
        """Returns once so many chunks have come."""
        assert await self._news.wait_until(lambda: len(self.values) >= count, TIMEOUT_S)

    async def until_staged(self, count: int = 1) -> None:
        """Returns once `staged` was told so many times."""
        assert await self._news.wait_until(lambda: len(self.staged) >= count, TIMEOUT_S)

    async def until_waiting(self) -> push_pb2.Waiting:
        """What the call is told that it waits for."""
        assert await self._news.wait_until(lambda: bool(self.waiting), TIMEOUT_S)
        return self.waiting[-1]

    async def _read(self, responses: AsyncIterator[bytes]) -> None:
        async for message in responses:
            await self.is_read.wait()
            self._take(message)
            self._news.notify()

    def _take(self, message: bytes) -> None:
        for field, view in split_fields(message):
            if field == RESPONSE_CHUNK_FIELD:
                frame = decode_chunk(view)
                if frame.encoding != ENCODING_UNCHANGED:
                    self.values.append(_value_of(self._shard, frame))
        response = parameter_service_pb2.PushPullResponse.FromString(message)
        if response.HasField("waiting"):
            self.waiting.append(response.waiting)
        if response.HasField("staged"):
            names = [worker.worker_id for worker in response.staged.workers]
            self.staged.append((response.staged.clock, names))
        if response.HasField("reply"):
            self.reply = response.reply


class OpenPush(_Open):
    """A push under way."""

    def __init__(self, shard: ServedShard) -> None:
        super().__init__(shard)
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        self._begin(shard.service.push_pull(self._messages(), NO_CONTEXT))

    def send(self, message: bytes) -> None:
        self._requests.put_nowait(message)

    async def _messages(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._requests.get()


class OpenPull(_Open):
    """A pull under way."""

    def __init__(self, shard: ServedShard, request: Any) -> None:  # noqa: ANN401
        super().__init__(shard)
        self._begin(shard.service.pull(request, NO_CONTEXT))


def _value_of(shard: ServedShard, frame: ChunkFrame) -> tuple[int, float]:
    """Index and value of a chunk whose elements are all equal."""
    frame.verify()
    element_type = shard.host.model.chunks[frame.index].element_type
    values = tensor_from_buffer(frame.data, element_type)
    assert torch.equal(values, values[:1].expand(len(values)))
    return frame.index, float(values[0])


class OpenPushOnce(_Open):
    """A call of `PushPullOnce`."""

    def __init__(self, shard: ServedShard, message: bytes) -> None:
        super().__init__(shard)

        async def requests() -> AsyncIterator[bytes]:
            yield message

        self._begin(shard.service.push_pull_once(requests(), NO_CONTEXT))

    async def ended(self) -> None:
        """Returns when the call has ended, with a reply or without."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.task
