"""The values of a chunk as messages for workers, in as many bytes as the job says."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import compress

import torch

from psserver.shard.tensors.sent_values import SentChunk, SentValues
from psserver.shard.tensors.shard_vectors import present_runs
from pswire.compression import Compression
from pswire.encodings.change import digest_of, pack_change
from pswire.frames import (
    ENCODING_CHANGE,
    ENCODING_UNCHANGED,
    bits_to_bytes,
    encode_chunk,
    encode_parts,
)
from pswire.placement import Chunk
from pswire.torch_types import buffer_of

Presence = Sequence[bool]

Messages = tuple[bytes, ...]

Seen = Callable[[], torch.Tensor]
"""Makes all elements of a chunk as their receiver has them; for a moment."""


class ValuesEncoder:
    """Encodes values of a shard. Buffers go as they are.

    Threads that work on different chunks may call at once; whoever calls for a chunk
    holds its lock.

    Args:
        compression: As the job has chosen.
        buffer_entries: Entries of the schema that are buffers.
    """

    def __init__(
        self, compression: Compression, buffer_entries: Collection[int]
    ) -> None:
        self._encoding = compression.pull_encoding
        self._ratio = compression.ratio
        self._buffers = frozenset(buffer_entries)
        self._updates: Counter[int] = Counter()
        # By chunk, the change that was made last, and of what it was made.
        self._newest: dict[int, tuple[int, SentChunk]] = {}

    def note_update(self, chunk_index: int) -> None:
        """A chunk has other values now."""
        self._updates[chunk_index] += 1

    @property
    def sends_changes(self) -> bool:
        """Whether a message depends on what its receiver was sent before."""
        return self._encoding is not None and self._encoding.sends_changes

    def encode(
        self,
        chunk: Chunk,
        values: torch.Tensor,
        outer_field: int,
        presence: Presence,
        reader: SentValues | None,
        sequence: int | None,
        held_digest: int | None = None,
    ) -> tuple[Messages, Seen]:
        """Messages with values of a chunk.

        Args:
            chunk: The chunk.
            values: All its elements, 1-D.
            outer_field: Field number of the chunk in the message.
            presence: Which slices.
            reader: What the worker that it is for was sent before. None for any: no
                change is made for it.
            sequence: The push that it answers; None for values as they are.
            held_digest: Of all elements that the receiver has. Where they are the same
                the message has none.

        Returns:
            The messages, several for a chunk that comes in parts, and what makes all
            elements as their receiver has them, while the values are the same.
        """
        if sequence is None:
            if reader is not None:
                self.note_exact(chunk, values, reader)
            if held_digest is not None and held_digest == digest_of(values):
                message = unchanged_message(chunk, outer_field, presence, held_digest)
                return (message,), lambda: values
            return raw_messages(chunk, values, outer_field, presence), lambda: values
        if self._has_already(chunk, presence, reader, sequence):
            message = unchanged_message(chunk, outer_field, presence)
            # As they came then: nothing has changed since.
            come = partial(self._whole, chunk, values, outer_field, presence)
            return (message,), lambda: come()[1]()
        if self.sends_changes and self._is_encoded(chunk):
            if reader is None:
                return self._exact(chunk, values, outer_field)
            return self._change(chunk, values, outer_field, presence, reader, sequence)
        return self._whole(chunk, values, outer_field, presence)

    def _whole(
        self, chunk: Chunk, values: torch.Tensor, outer_field: int, presence: Presence
    ) -> tuple[Messages, Seen]:
        """Messages that depend on nothing that their receiver has."""
        encoding = self._encoding
        if encoding is None or not encoding.takes(chunk.element_type):
            return raw_messages(chunk, values, outer_field, presence), lambda: values
        is_sent = self._parameters(chunk, presence)
        codec = encoding.codec(self._ratio)
        sent = picked(chunk, values, is_sent).float()
        data = codec.encode(sent)
        message = encode_chunk(
            outer_field,
            index=chunk.index,
            presence=bits_to_bytes(presence),
            data=b"".join((self._raw_buffers(chunk, values, presence), data)),
            encoding=encoding.number,
        )

        def seen() -> torch.Tensor:
            decoded = codec.decode(memoryview(data), sent.numel())
            return with_part(chunk, values, is_sent, decoded)

        return (message,), seen

    def note_exact(
        self, chunk: Chunk, values: torch.Tensor, reader: SentValues, sequence: int = 0
    ) -> None:
        """A worker is sent all values of a chunk as they are."""
        if not (self.sends_changes and self._is_encoded(chunk)):
            return
        own = picked(chunk, values, self._parameters(chunk))
        digest = source = digest_of(own)
        if len(own) < len(values):
            source = digest_of(values)
        sent = self._made(chunk, digest, source)
        if sent is None:
            sent = SentChunk(own.clone(), digest, source)
            self._newest[chunk.index] = digest, sent
        reader.chunks[chunk.index] = sequence, sent

    def _made(self, chunk: Chunk, before: int, source: int) -> SentChunk | None:
        """What was made last of a chunk, if of the same: of both these digests."""
        known = self._newest.get(chunk.index)
        if known is not None and known[0] == before and known[1].source == source:
            return known[1]
        return None

    def _change(
        self,
        chunk: Chunk,
        values: torch.Tensor,
        outer_field: int,
        presence: Presence,
        reader: SentValues,
        sequence: int,
    ) -> tuple[Messages, Seen]:
        """What is to be added to what a worker has; all values where that is unknown.

        A worker that pushes has had the answer to its push before. Of the answer to
        this one, which it asks for again after its call has broken, it has had a part:
        it gets the same bytes, of which it sees whether it has them already.
        """
        # Of buffers too: a message has them, also where no parameter has changed.
        source = digest_of(values)
        known = reader.chunks.get(chunk.index)
        if known is not None and known[0] != sequence:
            sent = self._changed(chunk, values, outer_field, presence, known[1], source)
            reader.chunks[chunk.index] = sequence, sent
        elif known is not None and known[1].source == source and known[1].message:
            sent = known[1]
        else:
            self.note_exact(chunk, values, reader, sequence)
            return self._exact(chunk, values, outer_field)
        assert sent.message is not None, "a change was made"
        is_own = self._parameters(chunk)
        return (sent.message,), partial(with_part, chunk, values, is_own, sent.values)

    def _has_already(
        self,
        chunk: Chunk,
        presence: Presence,
        reader: SentValues | None,
        sequence: int,
    ) -> bool:
        """Whether a worker has had the values with the answer to an earlier push.

        Not of buffers, which a worker's own forward passes change.
        """
        if reader is None or self.sends_changes:
            return False
        has = reader.note_update(chunk.index, sequence, self._updates[chunk.index])
        return has and self._parameters(chunk, presence) == list(presence)

    def _exact(
        self, chunk: Chunk, values: torch.Tensor, outer_field: int
    ) -> tuple[Messages, Seen]:
        everything = (True,) * len(chunk.slices)
        return raw_messages(chunk, values, outer_field, everything), lambda: values

    def _changed(
        self,
        chunk: Chunk,
        values: torch.Tensor,
        outer_field: int,
        presence: Presence,
        before: SentChunk,
        source: int,
    ) -> SentChunk:
        """What a worker has after a change, with the message that makes it."""
        assert self._encoding is not None, "changes are sent"
        made = self._made(chunk, before.digest, source)
        if made is not None and made.message and made.presence == tuple(presence):
            return made
        codec = self._encoding.codec(self._ratio)
        is_own = self._parameters(chunk)
        bits = list(compress(presence, is_own))
        sizes = [each.element_count for each in compress(chunk.slices, is_own)]
        wanted = picked(chunk, values, self._parameters(chunk, presence))
        new = before.values.clone()
        parts = [] if all(bits) else list(compress(new.split(sizes), bits))
        part = new if all(bits) else torch.cat(parts) if parts else new[:0]
        data = codec.encode(wanted.float() - part.float())
        codec.add_to(part, memoryview(data))
        if parts:
            torch._foreach_copy_(parts, part.split([len(each) for each in parts]))
        digest = digest_of(new)
        header = pack_change(before.digest, digest, self._encoding)
        buffers = self._raw_buffers(chunk, values, presence)
        message = encode_chunk(
            outer_field,
            index=chunk.index,
            presence=bits_to_bytes(presence),
            data=b"".join((header, buffers, data)),
            encoding=ENCODING_CHANGE,
        )
        sent = SentChunk(new, digest, source, message, tuple(presence))
        self._newest[chunk.index] = before.digest, sent
        return sent

    def _is_encoded(self, chunk: Chunk) -> bool:
        encoding = self._encoding
        return encoding is not None and encoding.takes(chunk.element_type)

    def _parameters(self, chunk: Chunk, presence: Presence | None = None) -> list[bool]:
        """Which slices are of parameters, all or those that are present."""
        bits = presence or (True,) * len(chunk.slices)
        return [
            bit and piece.entry_index not in self._buffers
            for bit, piece in zip(bits, chunk.slices, strict=True)
        ]

    def _raw_buffers(
        self, chunk: Chunk, values: torch.Tensor, presence: Presence
    ) -> memoryview:
        is_raw = [
            bit and piece.entry_index in self._buffers
            for bit, piece in zip(presence, chunk.slices, strict=True)
        ]
        return buffer_of(picked(chunk, values, is_raw))


def unchanged_message(
    chunk: Chunk, outer_field: int, presence: Presence, digest: int | None = None
) -> bytes:
    """A message for who has the values of a chunk."""
    return encode_chunk(
        outer_field,
        index=chunk.index,
        presence=bits_to_bytes(presence),
        data=b"",
        encoding=ENCODING_UNCHANGED,
        digest=digest,
    )


def raw_messages(
    chunk: Chunk, values: torch.Tensor, outer_field: int, presence: Presence
) -> Messages:
    """Messages with values of a chunk as they are."""
    return tuple(
        encode_parts(
            outer_field,
            index=chunk.index,
            presence=bits_to_bytes(presence),
            data=buffer_of(picked(chunk, values, presence)),
        )
    )


def picked(chunk: Chunk, values: torch.Tensor, presence: Presence) -> torch.Tensor:
    """Elements of some slices, 1-D; shares memory where they are adjacent."""
    runs = [values[start:stop] for start, stop in present_runs(chunk, presence)]
    if len(runs) == 1:
        return runs[0]
    return torch.cat(runs) if runs else values[:0]


def with_part(
    chunk: Chunk, values: torch.Tensor, presence: Presence, part: torch.Tensor
) -> torch.Tensor:
    """A copy of all elements of a chunk, with those of some slices from elsewhere."""
    made = values.clone()
    position = 0
    for start, stop in present_runs(chunk, presence):
        count = stop - start
        made[start:stop] = part[position : position + count]
        position += count
    return made
