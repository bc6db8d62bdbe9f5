"""Gradients in fewer bytes, and what these leave out.

What an encoding leaves out of a gradient, its residual, is added to the next one. A
residual is this worker's own. It changes only when a push that was built with it is
settled and counts: bytes that are built anew, sent again or thrown away leave it as it
was. So a push that was dropped or skipped loses no more than its own gradient, as
without compression. A shard refuses what is not finite, so a residual that would make a
push so is thrown away. See `docs/compression.md`.

In the thread that steps, but for `PushEncoder.encode`, which may be in any one thread.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import Final

import numpy as np
import torch
import xxhash

from pswire.compression import Compression
from pswire.encodings.known import Encoding
from pswire.limits import GRADIENT_NORM_MAX
from pswire.placement import Chunk, Slice
from pswire.schema import EntryKind, ModelSchema
from pswire.torch_types import buffer_of

logger: Final = logging.getLogger("psworker")

_PUSH_COUNT_PER_LINE: Final = 100
"""Gradients near the limit have it in every second push."""

Residuals = dict[int, torch.Tensor]
"""What has not been sent, by entry of the schema: float32, 1-D, on the CPU."""

Pieces = tuple[Slice, ...]


class ResidualStore:
    """Residuals of the gradients of one optimizer.

    A slice's residual is that of its chunk, if that was put with this slice last, else
    that of its tensor, else zeros.
    """

    def __init__(self, entry_sizes: Sequence[int], known: Residuals) -> None:
        """Goes on with known residuals, which it owns; sizes are in elements."""
        self._entry_sizes = entry_sizes
        self._of_entry = known
        self._of_chunk: dict[int, tuple[Pieces, torch.Tensor]] = {}
        self._element_counts: Counter[int] = Counter()  # in chunks, by entry
        self._spare: dict[int, torch.Tensor] = {}

    @property
    def byte_count(self) -> int:
        """Bytes of all memory that is held."""
        kept = [*self._of_entry.values(), *self._spare.values()]
        kept += [residual for _, residual in self._of_chunk.values()]
        return sum(each.nbytes for each in kept)

    def by_entry(self) -> Residuals:
        """A copy, as it is saved."""
        found = {index: each.clone() for index, each in self._of_entry.items()}
        for pieces, residual in self._of_chunk.values():
            self._write(found, pieces, residual)
        return found

    def of(self, chunk_index: int, pieces: Pieces) -> torch.Tensor | None:
        """Residuals of some slices of a chunk, 1-D; None where all are zero."""
        known = self._of_chunk.get(chunk_index)
        if known is not None and known[0] == pieces:
            return known[1]
        entries = self._of_entry
        if known is not None:
            entries = {
                piece.entry_index: entries[piece.entry_index].clone()
                for piece in (*known[0], *pieces)
                if piece.entry_index in entries
            }
            self._write(entries, *known)
        if not any(piece.entry_index in entries for piece in pieces):
            return None
        return torch.cat(
            [
                entries[piece.entry_index][piece.start : piece.stop]
                if piece.entry_index in entries
                else torch.zeros(piece.element_count)
                for piece in pieces
            ]
        )

    def memory(self, chunk_index: int, element_count: int) -> torch.Tensor:
        """Memory for the next residual of a chunk, 1-D float32, not filled."""
        spare = self._spare.pop(chunk_index, None)
        if spare is None or spare.numel() != element_count:
            return torch.empty(element_count)
        return spare

    def give_back(self, chunk_index: int, memory: torch.Tensor) -> None:
        """Takes back what `memory` has returned."""
        self._spare[chunk_index] = memory

    def put(self, chunk_index: int, pieces: Pieces, residual: torch.Tensor) -> None:
        """Sets the residuals of some slices of a chunk, in what `memory` returned."""
        known = self._of_chunk.pop(chunk_index, None)
        if known is not None:
            self._count(known[0], -1)
            if known[0] != pieces:
                self._write(self._of_entry, *known)
            self._spare[chunk_index] = known[1]
        self._of_chunk[chunk_index] = pieces, residual
        self._count(pieces, 1)
        for entry in {piece.entry_index for piece in pieces}:
            if self._element_counts[entry] == self._entry_sizes[entry]:
                self._of_entry.pop(entry, None)

    def _count(self, pieces: Pieces, sign: int) -> None:
        for piece in pieces:
            self._element_counts[piece.entry_index] += sign * piece.element_count

    def _write(
        self, entries: Residuals, pieces: Pieces, residual: torch.Tensor
    ) -> None:
        """Writes residuals of slices into those of their tensors."""
        parts = residual.split([piece.element_count for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            whole = entries.get(piece.entry_index)
            if whole is None:
                size = self._entry_sizes[piece.entry_index]
                whole = entries[piece.entry_index] = torch.zeros(size)
            whole[piece.start : piece.stop] = part


class PushCompression:
    """What a worker keeps for the gradients of all its pushes.

    Attributes:
        ratio: Share of the elements that `topk` sends.
        buffers: Entries that are buffers, which are sent as they are.
        log: Notes residuals that were thrown away.
    """

    def __init__(self, compression: Compression, schema: ModelSchema) -> None:
        self._encoding = compression.push_encoding
        self.ratio = compression.ratio
        self._sizes = [entry.element_count for entry in schema.entries]
        self.buffers = frozenset(
            index
            for index, entry in enumerate(schema.entries)
            if entry.kind is EntryKind.BUFFER
        )
        self._residuals: dict[str, ResidualStore] = {}
        self.log = _ResidualLog()

    @property
    def byte_count(self) -> int:
        """Bytes of all residuals, and of the memory for the next ones."""
        return sum(residuals.byte_count for residuals in self._residuals.values())

    def encoder(
        self, optimizer: str, seed_text: str, *, loss_scale: float
    ) -> "PushEncoder | None":
        """Encodes the gradients of one push; None if they are sent as they are.

        Args:
            optimizer: The one that the gradients are for.
            seed_text: Of this push alone, and the same in a run that is repeated: noise
                of rounding follows from it and from the chunk.
            loss_scale: Factor that its gradients carry.
        """
        if self._encoding is None:
            return None
        residuals = self._residuals.setdefault(
            optimizer, ResidualStore(self._sizes, {})
        )
        return PushEncoder(
            self, self._encoding, residuals, seed_text=seed_text, loss_scale=loss_scale
        )

    def residuals_of(self, optimizer: str) -> Residuals:
        """A copy of what an optimizer's gradients have not sent."""
        known = self._residuals.get(optimizer)
        return {} if known is None else known.by_entry()

    def load(self, optimizer: str, residuals: Residuals) -> None:
        """Goes on with what a worker has saved.

        Where nothing is left out of the gradients that are sent, it is thrown away:
        later state would have it still, of values from long before.
        """
        if self._encoding is None or not self._encoding.keeps_residual:
            return
        self._residuals[optimizer] = ResidualStore(
            self._sizes,
            {index: residual.clone() for index, residual in residuals.items()},
        )


class PushEncoder:
    """Encodes the gradients of one push.

    Attributes:
        loss_scale: Factor that they carry.
    """

    def __init__(
        self,
        compression: PushCompression,
        encoding: Encoding,
        residuals: ResidualStore,
        *,
        seed_text: str,
        loss_scale: float,
    ) -> None:
        """Encodes nothing yet.

        Args:
            compression: Of the worker.
            encoding: How.
            residuals: Of the optimizer, as of the last push that counted.
            seed_text: Names the push: what is random follows from it.
            loss_scale: Factor that the gradient carries; residuals carry none.
        """
        self._encoding = encoding
        self._codec = encoding.codec(compression.ratio)
        self._residuals = residuals
        self._buffers = compression.buffers
        self._seed_text = seed_text
        self.loss_scale = loss_scale or 1.0
        self._log = compression.log
        self._left: dict[int, tuple[Pieces, torch.Tensor]] = {}
        self._without_residual: set[int] = set()

    def encode(
        self, chunk: Chunk, presence: Sequence[bool], data: torch.Tensor
    ) -> tuple[int, bytes] | None:
        """The data of a dense chunk in fewer bytes, with the number of their encoding.

        Called again for a chunk, it replaces what it made before.

        Args:
            chunk: The chunk.
            presence: Which of its slices there are.
            data: Their elements, 1-D, on the CPU. Left as they are.

        Returns:
            None if the chunk is to be sent as it is.
        """
        if not self._encoding.takes(chunk.element_type):
            return None
        present = tuple(compress(chunk.slices, presence))
        pieces = tuple(
            each for each in present if each.entry_index not in self._buffers
        )
        if not pieces or pieces != present[: len(pieces)]:
            return None  # of buffers alone; they come last in a schema
        count = sum(each.element_count for each in pieces)
        values = data[:count].float()
        seed = xxhash.xxh3_64_intdigest(f"{self._seed_text} {chunk.index}".encode())
        if self._encoding.keeps_residual:
            encoded = self._with_residual(chunk.index, pieces, values, seed)
        else:
            encoded = self._codec.encode(values, seed=seed)
        buffers = buffer_of(data[count:])
        message = b"".join((buffers, encoded)) if len(buffers) else encoded
        return self._encoding.number, message

    def settle(self, *, is_counted: bool) -> None:
        """Makes what a push left out the residual, if it counts."""
        left, self._left = self._left, {}
        for chunk_index, (pieces, residual) in left.items():
            if is_counted:
                self._residuals.put(chunk_index, pieces, residual)
            else:
                self._residuals.give_back(chunk_index, residual)
        # Not before: a gradient may not be finite itself, and then nothing is lost.
        if is_counted and self._without_residual:
            self._log.note(len(self._without_residual))
        self._without_residual.clear()

    def _with_residual(
        self, chunk_index: int, pieces: Pieces, values: torch.Tensor, seed: int
    ) -> bytes:
        """Encodes elements together with what was left out before.

        By numpy and in place, chunk by chunk in the cache of one core: see `added`.
        Without what was left out, if a shard would refuse the sum: it would refuse
        this worker's next pushes too, as what is left out would be more each time.
        """
        self._without_residual.discard(chunk_index)
        if chunk_index in self._left:
            self._residuals.give_back(chunk_index, self._left.pop(chunk_index)[1])
        left = self._residuals.memory(chunk_index, len(values))
        total = left.numpy()
        known = self._residuals.of(chunk_index, pieces)
        if known is None:
            np.copyto(total, values.numpy())
        elif self.loss_scale == 1.0:
            np.add(values.numpy(), known.numpy(), out=total)
        else:
            np.multiply(known.numpy(), np.float32(self.loss_scale), out=total)
            np.add(values.numpy(), total, out=total)
        if known is not None and not _is_taken(left, self.loss_scale):
            self._without_residual.add(chunk_index)
            np.copyto(total, values.numpy())
        encoded = self._codec.take(left, seed=seed)
        if self.loss_scale != 1.0:
            np.divide(total, np.float32(self.loss_scale), out=total)
        self._left[chunk_index] = pieces, left
        return encoded


class _ResidualLog:
    """One line for the first push without a residual, then one for each hundred."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, chunk_count: int) -> None:
        """A push that counts was sent without the residuals of some chunks.

        Args:
            chunk_count: How many; at least 1.
        """
        self._count += 1
        if self._count == 1:
            logger.warning(
                "in %d of a push's chunks what earlier ones had not sent was thrown "
                "away, since together with the gradient its norm was not finite or "
                "above %g, which no shard takes; the gradient itself was sent. "
                "Gradients so large most often mean that training diverges: lower the "
                "learning rate, or clip with prepare(..., clip_grad_norm=...)",
                chunk_count,
                GRADIENT_NORM_MAX,
            )
        elif self._count % _PUSH_COUNT_PER_LINE == 0:
            logger.warning(
                "%d pushes were sent without what earlier ones had left out so far",
                self._count,
            )


def _is_taken(values: torch.Tensor, loss_scale: float) -> bool:
    """Whether shards take a chunk: its norm is a number and within the limit.

    What is sent of it has no larger norm. The largest element alone shows it but for
    gradients near the limit, and takes no threads, as a norm would.
    """
    elements = values.numpy()
    largest = max(
        abs(float(elements.max(initial=0.0))), abs(float(elements.min(initial=0.0)))
    )
    if largest * math.sqrt(len(elements)) <= GRADIENT_NORM_MAX * loss_scale:
        return True
    norm: float = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    return norm <= GRADIENT_NORM_MAX * loss_scale
