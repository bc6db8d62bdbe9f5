"""Which rows of a slice a sparse gradient holds, and their place among its elements.

A row is what an index of a tensor's first dimension selects: of an embedding, one
vector. Slices are cut without regard to rows, so the first and the last row of a slice
may lie in it only in part; a row in the middle of a long one may even contain it. A
sparse chunk holds, of each row it names, the elements that lie in its slice.

Pure but for numpy. `unpack_rows` takes hostile bytes: it raises `Refusal` and nothing
else, and allocates no more than the bytes that came.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, Self

import numpy as np
import numpy.typing as npt

from pswire.placement import Chunk, Slice
from pswire.reasons import ErrorReason, Refusal

if TYPE_CHECKING:
    from typing_extensions import Buffer

Int64s = npt.NDArray[np.int64]

NUMBER_BYTES: Final = 8
"""Bytes of a row number, and of a count of them."""

_WIRE_TYPE: Final = np.dtype("<i8")
_DENSE: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class SliceRows:
    """Rows of one slice.

    Attributes:
        piece: The slice.
        row_length: Elements of a row of its tensor, at least 1.
        rows: [n] int64, sorted and unique; each lies in the slice at least in part.
    """

    piece: Slice
    row_length: int
    rows: Int64s

    @classmethod
    def among(cls, piece: Slice, row_length: int, rows: Int64s) -> tuple[Self, int]:
        """The rows of a slice out of those of a whole tensor.

        Args:
            piece: The slice.
            row_length: Elements of a row.
            rows: [m] int64, sorted and unique.

        Returns:
            The rows, and which of the m is the first of them.
        """
        low, high = np.searchsorted(rows, cls._bounds(piece, row_length)).tolist()
        return cls(piece, row_length, rows[low:high]), low

    @property
    def skipped(self) -> int:
        """Elements of the first row that lie before the slice."""
        if not len(self.rows):
            return 0
        return max(0, self.piece.start - int(self.rows[0]) * self.row_length)

    @property
    def element_count(self) -> int:
        """Elements of the rows that lie in the slice."""
        return len(self.rows) * self.row_length - self.skipped - self._cut_off

    @property
    def _cut_off(self) -> int:
        """Elements of the last row that lie behind the slice."""
        if not len(self.rows):
            return 0
        end = (int(self.rows[-1]) + 1) * self.row_length
        return max(0, end - self.piece.stop)

    def positions(self) -> Int64s:
        """[element_count] int64: where the elements are in the slice, ascending."""
        return self._elements_at(self.rows) - self.piece.start

    def positions_in(self, other: "SliceRows") -> Int64s:
        """[element_count] int64: where the elements are among those of other rows.

        Args:
            other: Rows of the same slice, which contain these.
        """
        places = np.searchsorted(other.rows, self.rows)
        return self._elements_at(places) - other.skipped

    def united(self, others: Sequence["SliceRows"]) -> "SliceRows":
        """These rows and those of others of the same slice."""
        rows = np.unique(np.concatenate([self.rows, *(each.rows for each in others)]))
        return SliceRows(self.piece, self.row_length, rows)

    @staticmethod
    def _bounds(piece: Slice, row_length: int) -> tuple[int, int]:
        """First row that lies in a slice, and one past the last."""
        return piece.start // row_length, -(-piece.stop // row_length)

    def _elements_at(self, places: Int64s) -> Int64s:
        """Elements of rows that are at these places, without what the slice cuts.

        A row of which the slice holds a part may be much longer than the slice, so
        that the first and the last one are never spread out whole.
        """
        if not len(places):
            return places
        starts = places * self.row_length
        whole = self.row_length
        if len(places) == 1:
            return np.arange(
                starts[0] + self.skipped, starts[0] + whole - self._cut_off
            )
        between = starts[1:-1, None] + np.arange(whole if len(places) > 2 else 0)
        return np.concatenate(
            (
                np.arange(starts[0] + self.skipped, starts[0] + whole),
                between.reshape(-1),
                np.arange(starts[-1], starts[-1] + whole - self._cut_off),
            )
        )

    def check(self) -> None:
        """Checks rows that came from outside.

        Raises:
            Refusal: `CHUNK_INVALID`.
        """
        low, high = self._bounds(self.piece, self.row_length)
        where = f"slice of tensor {self.piece.entry_index}"
        if not (self.rows[1:] > self.rows[:-1]).all():
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"the rows of a {where} are not sorted and unique",
            )
        if len(self.rows) and not (low <= self.rows[0] and self.rows[-1] < high):
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"rows {self.rows[0]} to {self.rows[-1]} of a {where} came, and rows "
                f"{low} to {high - 1} lie in it",
            )


def pack_rows(slices: Sequence[SliceRows | None]) -> bytes:
    """Writes `row_indices` of a chunk.

    Args:
        slices: One for each present slice, in schema order; None for a dense one.
    """
    parts = []
    for each in slices:
        count = _DENSE if each is None else len(each.rows)
        parts.append(count.to_bytes(NUMBER_BYTES, "little", signed=True))
        if each is not None:
            parts.append(each.rows.astype(_WIRE_TYPE, copy=False).tobytes())
    return b"".join(parts)


def unpack_rows(
    row_indices: "Buffer",
    chunk: Chunk,
    presence: Sequence[bool],
    row_lengths: Sequence[int],
) -> tuple[SliceRows | None, ...]:
    """Reads `row_indices` of a chunk.

    Args:
        row_indices: The bytes, which need not be aligned. They are copied.
        chunk: The chunk.
        presence: Which of its slices are present.
        row_lengths: Elements of a row of each tensor of the schema.

    Returns:
        One for each slice of the chunk; None for one that is dense or absent.

    Raises:
        Refusal: `MALFORMED_MESSAGE` or `CHUNK_INVALID`, with what was expected.
    """
    view = memoryview(row_indices).cast("B")
    position = 0
    found: list[SliceRows | None] = []
    for piece, is_present in zip(chunk.slices, presence, strict=True):
        if not is_present:
            found.append(None)
            continue
        start = position + NUMBER_BYTES
        if start > len(view):
            _refuse(chunk, f"end at byte {len(view)}, before those of all slices")
        count = int.from_bytes(view[position:start], "little", signed=True)
        if count < _DENSE:
            _refuse(chunk, f"announce {count} rows at byte {position}")
        position = start
        if count == _DENSE:
            found.append(None)
            continue
        if count > (len(view) - start) // NUMBER_BYTES:
            _refuse(
                chunk,
                f"announce {count} rows at byte {start - NUMBER_BYTES}, and "
                f"{len(view) - start} bytes follow",
            )
        position = start + count * NUMBER_BYTES
        rows = np.frombuffer(view[start:position], _WIRE_TYPE).astype(np.int64)
        slice_rows = SliceRows(piece, row_lengths[piece.entry_index], rows)
        slice_rows.check()
        found.append(slice_rows)
    if position != len(view):
        _refuse(chunk, f"go on for {len(view) - position} bytes after the last slice")
    return tuple(found)


def _refuse(chunk: Chunk, what: str) -> NoReturn:
    raise Refusal(
        ErrorReason.MALFORMED_MESSAGE,
        f"the row indices of chunk {chunk.index} {what}",
    )
