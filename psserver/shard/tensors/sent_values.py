"""What a worker was last sent of each chunk of a shard."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class SentChunk:
    """What a worker has of the parameters of a chunk, in a job that pulls changes.

    It lacks what the encoding has left out so far. Workers that were sent the same
    share one, as all that began together do in BSP.

    Attributes:
        values: Elements, 1-D.
        digest: Of these.
        source: Digest of the shard's own values at that time, buffers included.
        message: What was sent, None where it was all of them.
        presence: Slices that the message has.
    """

    values: torch.Tensor
    digest: int
    source: int
    message: bytes | None = None
    presence: tuple[bool, ...] = ()


class SentValues:
    """Of one worker, made when it becomes a member and dropped when that ends.

    Any thread that applies or encodes a chunk reads and writes the items of that chunk,
    under the chunk's lock. Only the event loop replaces `copies`, and adds up bytes.

    Attributes:
        updates: By chunk, the push that was answered with it, and which update it had.
        chunks: By chunk, the push that was answered with it, and what the worker has
            since; of a job that pulls changes.
        copies: By chunk, the values that the worker computes with, for delay
            compensation; None while none are kept.
    """

    def __init__(self) -> None:
        self.updates: dict[int, tuple[int, int]] = {}
        self.chunks: dict[int, tuple[int, SentChunk]] = {}
        self.copies: dict[int, torch.Tensor] | None = None

    def keep_copies(self, is_wanted: bool) -> None:
        """Begins to keep copies, or drops them."""
        if is_wanted is (self.copies is None):
            self.copies = {} if is_wanted else None

    def note_update(self, chunk_index: int, sequence: int, update: int) -> bool:
        """A chunk is part of the answer to a push.

        A worker that pushes has had the answer to its push before. Of the answer to
        this one, which it asks for again after its call has broken, nobody knows what
        it has had.

        Returns:
            Whether the worker has this update already.
        """
        known = self.updates.get(chunk_index)
        if known is not None and known[0] < sequence and known[1] == update:
            return True
        self.updates[chunk_index] = sequence, update
        return False

    def note_copy(self, chunk_index: int, values: torch.Tensor) -> None:
        """The worker will compute with these values of a chunk."""
        copies = self.copies
        if copies is None:
            return
        known = copies.get(chunk_index)
        if known is None:
            copies[chunk_index] = values.clone()
        else:
            known.copy_(values)

    def copy_of(self, chunk_index: int) -> torch.Tensor | None:
        """The values of a chunk that the worker computes with, if they are kept."""
        return None if self.copies is None else self.copies.get(chunk_index)


def sent_bytes(workers: Iterable[SentValues]) -> int:
    """Bytes that are kept for workers; what they share counts once."""
    shared: dict[int, SentChunk] = {}
    byte_count = 0
    for sent in workers:
        # Threads may add items meanwhile: a list of them is made at one go.
        shared.update((id(chunk), chunk) for _, chunk in list(sent.chunks.values()))
        byte_count += sum(copy.nbytes for copy in list((sent.copies or {}).values()))
    return byte_count + sum(
        chunk.values.nbytes + len(chunk.message or b"") for chunk in shared.values()
    )
