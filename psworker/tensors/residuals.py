"""What gradients have not sent yet, as it is added to the next ones.

Kept by chunk, in the order that gradients are sent in, so that it is added in one pass;
a script saves it by tensor. While a push is under way, its residuals and those before
it are kept, and their memory is used in turns.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from pswire.placement import Slice

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
