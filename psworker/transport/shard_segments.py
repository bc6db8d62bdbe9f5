"""Memory that a worker shares with one shard on its machine: gradients and values.

A gradient is written into this worker's segment, each chunk once for each push: the
shard may read it until it has answered, and a resend refers to the same bytes. Values
are read out of the shard's memory, in which they may go on changing: a version that
is the same before and after shows that what was read is whole, and newer values than
those announced are as good.

Both processes look first whether they can share memory. Whatever stands against it
leaves tensors on gRPC, with the reason for the log.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import numpy as np
import torch
import xxhash

from pswire.frames import (
    REQUEST_CHUNK_FIELD,
    ChunkFrame,
    bits_from_bytes,
    bits_to_bytes,
    decode_chunk,
    encode_chunk,
    encode_shared_chunk,
    split_fields,
)
from pswire.placement import Chunk, Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.shared_memory.handshake import (
    ACKNOWLEDGEMENT,
    HANDSHAKE_TIMEOUT_S,
    Answer,
    Offer,
    address_of,
    check_peer,
)
from pswire.shared_memory.segments import (
    GradientLayout,
    MemorySegment,
    SegmentError,
    SegmentKind,
    SharedRun,
    ValuesLayout,
    fence,
    is_worth_sharing,
)
from pswire.torch_types import buffer_of, tensor_from_buffer
from pswire.v1.parameter_service_pb2 import OpenSegmentsResponse
from psworker.tensors.tensor_chunks import Bytes, ChunkSource
from psworker.tensors.value_store import ValueStore, checked_chunk

logger: Final = logging.getLogger("psworker")

_ATTEMPT_COUNT_MAX: Final = 8
"""Of reading a chunk that changes meanwhile, before it is asked for as a message. An
update takes a millisecond, and others push it once in their step."""

Fetch = Callable[[int], Sequence[ChunkFrame]]
"""Asks a shard for values of a chunk in messages, from any thread but the loop's."""


def from_thread(
    fetch: Callable[[int], Coroutine[Any, Any, Sequence[ChunkFrame]]],
) -> Fetch:
    """Lets another thread than that of the running loop wait for a fetch."""
    loop = asyncio.get_running_loop()
    return lambda index: asyncio.run_coroutine_threadsafe(fetch(index), loop).result()


class ShardSegments:
    """Both segments of one shard, as this worker uses them.

    Gradients and values may be used by two threads at the same time.
    """

    def __init__(
        self,
        placement: Placement,
        shard_index: int,
        gradient: MemorySegment,
        values: MemorySegment,
    ) -> None:
        """Takes over the segments.

        Args:
            placement: How tensors are cut.
            shard_index: Which shard.
            gradient: Made here.
            values: Made by the shard.
        """
        self._placement = placement
        self._gradient_layout = GradientLayout.of(placement, shard_index)
        self._values_layout = ValuesLayout.of(placement, shard_index)
        self._gradient = gradient
        self._values = values
        self._target = np.frombuffer(gradient.data, np.uint8)
        # Words of 64 bits are read in one piece.
        self._table = values.data[self._values_layout.table].cast("Q")

    @torch.no_grad()
    def encode(self, source: ChunkSource, chunk: Chunk) -> bytes | None:
        """Writes a chunk into the gradient segment; a message that says so.

        None for a chunk that goes in a message of its own: a small one, or one with
        rows of a sparse gradient.
        """
        if not is_worth_sharing(chunk.byte_count) or not source.is_dense(chunk):
            return None
        parts = source.host_parts(chunk)
        if parts is None:
            parts = [np.frombuffer(buffer_of(source.gather(chunk).cpu()), np.uint8)]
        length = sum(map(len, parts))
        target = self._target[self._gradient_layout.run(chunk.index, length)]
        start = 0
        for part in parts:
            stop = start + len(part)
            np.copyto(target[start:stop], part)
            start = stop
        presence = bits_to_bytes(source.presence(chunk))
        return self.message(chunk, presence, length)

    def room(self, chunk: Chunk) -> Bytes | None:
        """Where a chunk goes in the gradient segment, None if it goes in a message."""
        if not is_worth_sharing(chunk.byte_count):
            return None
        return self._target[self._gradient_layout.run(chunk.index, chunk.byte_count)]

    def message(self, chunk: Chunk, presence: bytes, length: int) -> bytes:
        """A message about a chunk whose `room` was written to.

        Args:
            chunk: The chunk.
            presence: Bits of the slices that are there.
            length: Their bytes.
        """
        written = self._target[self._gradient_layout.run(chunk.index, length)]
        return encode_shared_chunk(
            index=chunk.index,
            presence=presence,
            digest=xxhash.xxh3_64_intdigest(written.data),
            shared=SharedRun(self._gradient.header.number, length),
        )

    def in_message(self, message: bytes) -> bytes:
        """What `encode` or `message` has said where it is, as a message that holds it.

        Good until the next push is encoded.
        """
        ((_, view),) = split_fields(message)
        frame = decode_chunk(view)
        shared = frame.shared
        assert shared is not None, "it is said to be in shared memory"
        assert shared.segment == self._gradient.header.number, "it was encoded here"
        run = self._gradient_layout.run(frame.index, shared.length)
        return encode_chunk(
            REQUEST_CHUNK_FIELD,
            index=frame.index,
            presence=frame.presence,
            data=self._target[run].data,
            digest=frame.digest,
        )

    def write(self, frame: ChunkFrame, store: ValueStore, fetch: Fetch) -> None:
        """Writes the values that a message has announced.

        Args:
            frame: What it announced.
            store: Where they go.
            fetch: Used where they change too often to be read.

        Raises:
            Refusal: As `ValueStore.write`.
            CallError: They could not be fetched.
        """
        chunk = self._chunk_of(frame)
        for _ in range(_ATTEMPT_COUNT_MAX):
            if self._write_whole(chunk, frame, store):
                return
            os.sched_yield()
        for part in fetch(chunk.index):
            store.write(part)

    def _chunk_of(self, frame: ChunkFrame) -> Chunk:
        shared = frame.shared
        assert shared is not None, "others hold their elements"
        run = self._values_layout.runs.get(frame.index)
        if run is None or shared.length != run.stop - run.start:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {frame.index} is said to have {shared.length} bytes in the "
                "shard's shared memory, where it has not",
            )
        if shared.segment != self._values.header.number:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"chunk {frame.index} is said to be in the segment "
                f"{shared.segment:016x} of shared memory, which was not handed over",
            )
        return self._placement.chunks[frame.index]

    def _write_whole(self, chunk: Chunk, frame: ChunkFrame, store: ValueStore) -> bool:
        """Writes a chunk. False if the shard changed it meanwhile: then it is a mix."""
        entry = self._values_layout.entries[chunk.index]
        version = self._table[entry]
        assert frame.shared is not None, "checked before"
        if version % 2 or version < frame.shared.version:
            return False
        fence()
        run = self._values_layout.runs[chunk.index]
        values = tensor_from_buffer(self._values.data[run], chunk.element_type)
        presence = bits_from_bytes(frame.presence, len(chunk.slices))
        if not all(presence):
            parts = values.split([piece.element_count for piece in chunk.slices])
            values = torch.cat(list(compress(parts, presence)))
        store.write_checked(checked_chunk(chunk, presence, values, version))
        fence()
        return self._table[entry] == version


class SharedValues:
    """Values in a shard's memory that a message has announced."""

    def __init__(
        self, segments: ShardSegments, frame: ChunkFrame, fetch: Fetch
    ) -> None:
        """Takes the message.

        Args:
            segments: Of the shard that has sent it.
            frame: The message.
            fetch: Asks the shard for the values as a message.
        """
        self._segments = segments
        self._frame = frame
        self._fetch = fetch

    def write(self, store: ValueStore) -> None:
        """Writes the values, as they are now; see `ShardSegments.write`."""
        self._segments.write(self._frame, store, self._fetch)


@dataclass(frozen=True, slots=True)
class Declined:
    """No memory is shared with a shard.

    Attributes:
        reason: Why.
        is_expected: Whether that is as it should be: it is on another machine, or
            somebody has switched it off.
    """

    reason: str
    is_expected: bool


async def hand_over(
    response: OpenSegmentsResponse, placement: Placement, shard_index: int
) -> ShardSegments | Declined:
    """Makes a gradient segment, gives it to a shard and maps the shard's values.

    Args:
        response: What the shard has said.
        placement: How tensors are cut.
        shard_index: Which shard.
    """
    if response.declined:
        return Declined(response.declined, is_expected=True)
    try:
        return await asyncio.to_thread(
            _hand_over, response.socket_name, response.token, placement, shard_index
        )
    except ConnectionRefusedError:
        reason = (
            "it is on this machine, but this process does not see its socket, as from "
            "another container"
        )
        return Declined(reason, is_expected=False)
    except (OSError, SegmentError) as error:
        return Declined(f"it is on this machine, but {error}", is_expected=False)


def _hand_over(
    name: str, token: bytes, placement: Placement, shard_index: int
) -> ShardSegments:
    size = GradientLayout.of(placement, shard_index).byte_count
    gradient = MemorySegment.create(SegmentKind.GRADIENT, size)
    with contextlib.closing(gradient), _connected(name) as peer:
        check_peer(peer)
        Offer(token, gradient.header, gradient.descriptor).send(peer)
        answer = Answer.receive(peer)
        values = MemorySegment.adopt(answer.header, answer.descriptor)
        expected = ValuesLayout.of(placement, shard_index).byte_count
        if answer.header.byte_count != expected:
            raise SegmentError(
                f"its segment of values has {answer.header.byte_count} bytes, "
                f"expected {expected}"
            )
        peer.send(ACKNOWLEDGEMENT)
    return ShardSegments(placement, shard_index, gradient, values)


def _connected(name: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        peer.settimeout(HANDSHAKE_TIMEOUT_S)
        peer.connect(address_of(name))
    except OSError:
        peer.close()
        raise
    return peer


class Segments:
    """By shard; none where tensors go over gRPC."""

    def __init__(self, by_shard: Mapping[int, ShardSegments] | None = None) -> None:
        self._by_shard = dict(by_shard or {})

    def of(self, shard_index: int) -> ShardSegments | None:
        """Memory shared with a shard, None if none is."""
        return self._by_shard.get(shard_index)

    def without(self, shard_index: int) -> "Segments":
        """What is left when a shard has lost its part: its tensors go over gRPC."""
        left = {i: each for i, each in self._by_shard.items() if i != shard_index}
        return Segments(left)

    def encode(self, source: ChunkSource, chunk: Chunk) -> bytes:
        """A `PushPullRequest` that holds only this chunk, or says where it is.

        In shared memory it is written over what was there: once for each push.
        """
        # A job that sends fewer bytes shares no memory.
        segments = self.of(chunk.shard_index) if source.encoder is None else None
        message = segments.encode(source, chunk) if segments is not None else None
        return message or source.encode(chunk, REQUEST_CHUNK_FIELD)


NO_SEGMENTS: Final = Segments()
"""All tensors go over gRPC."""


def segments_of(found: Sequence[ShardSegments | Declined]) -> Segments:
    """What came of asking every shard; says so in the log, in one line."""
    opened: dict[int, ShardSegments] = {}
    declined: dict[int, Declined] = {}
    for index, each in enumerate(found):
        if isinstance(each, Declined):
            declined[index] = each
        else:
            opened[index] = each
    if not declined:
        logger.info(
            "tensors go through shared memory to %s",
            "the shard" if len(found) == 1 else f"all {len(found)} shards",
        )
        return Segments(opened)
    is_expected = all(each.is_expected for each in declined.values())
    logger.log(
        logging.INFO if is_expected else logging.WARNING,
        "tensors go over gRPC to shard %s: %s",
        ", ".join(map(str, declined)),
        "; ".join(sorted({each.reason for each in declined.values()})),
    )
    return Segments(opened)
