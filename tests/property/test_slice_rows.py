"""Rows of slices against a plain list of elements, and against hostile bytes."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pswire.placement import Chunk, Slice
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType
from pswire.slice_rows import Int64s, SliceRows, pack_rows, unpack_rows

ChunkRows = tuple[SliceRows | None, ...]

checked = settings(derandomize=True, deadline=None, max_examples=100)


@st.composite
def slices_of_tables(draw: st.DrawFn, entry_index: int = 0) -> tuple[Slice, int, int]:
    """A slice of a table, the length of its rows and their number."""
    row_length = draw(st.integers(1, 9))
    row_count = draw(st.integers(1, 12))
    start = draw(st.integers(0, row_length * row_count - 1))
    stop = draw(st.integers(start + 1, row_length * row_count))
    return Slice(entry_index, start, stop), row_length, row_count


def some_rows(data: st.DataObject, row_count: int) -> Int64s:
    chosen = data.draw(st.sets(st.integers(0, row_count - 1)))
    return np.array(sorted(chosen), dtype=np.int64)


def elements(piece: Slice, row_length: int, rows: Int64s) -> list[int]:
    """Elements of a slice that belong to some rows, counted within the slice."""
    wanted = set(rows.tolist())
    return [
        element - piece.start
        for element in range(piece.start, piece.stop)
        if element // row_length in wanted
    ]


@checked
@given(st.data())
def test_rows_of_a_slice_are_those_of_its_elements(data: st.DataObject) -> None:
    piece, row_length, row_count = data.draw(slices_of_tables())
    rows = some_rows(data, row_count)

    found, first = SliceRows.among(piece, row_length, rows)

    found.check()
    expected = elements(piece, row_length, rows)
    assert found.positions().tolist() == expected
    assert found.element_count == len(expected)
    assert found.positions().dtype == np.int64
    # The elements are one run among those of all rows.
    start = first * row_length + found.skipped
    of_all = elements(Slice(0, 0, row_length * row_count), row_length, rows)
    run = of_all[start : start + found.element_count]
    assert [element - piece.start for element in run] == expected


@checked
@given(st.data())
def test_rows_find_their_place_in_a_union(data: st.DataObject) -> None:
    piece, row_length, row_count = data.draw(slices_of_tables())
    ours, _ = SliceRows.among(piece, row_length, some_rows(data, row_count))
    theirs, _ = SliceRows.among(piece, row_length, some_rows(data, row_count))

    union = ours.united([theirs])

    assert set(union.rows) == {*ours.rows, *theirs.rows}
    union.check()
    for each in (ours, theirs):
        places = each.positions_in(union)
        assert union.positions()[places].tolist() == each.positions().tolist()


def test_a_row_much_longer_than_its_slice_is_never_spread_out() -> None:
    row_length = 1 << 40
    piece = Slice(0, row_length - 2, row_length + 3)
    both, _ = SliceRows.among(piece, row_length, np.arange(3))

    assert both.rows.tolist() == [0, 1]
    assert both.positions().tolist() == [0, 1, 2, 3, 4]
    one, _ = SliceRows.among(Slice(0, 7, 9), row_length, np.arange(3))
    assert one.positions().tolist() == [0, 1]


def chunk_of(*pieces: Slice) -> Chunk:
    return Chunk(
        index=4,
        shard_index=0,
        element_type=ElementType.FLOAT32,
        slices=pieces,
        vector_start=0,
    )


@checked
@given(st.data())
def test_row_indices_come_back(data: st.DataObject) -> None:
    tables = [data.draw(slices_of_tables(index)) for index in range(3)]
    presence = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    sent: list[SliceRows | None] = []
    for piece, row_length, row_count in tables:
        rows, _ = SliceRows.among(piece, row_length, some_rows(data, row_count))
        sent.append(rows if data.draw(st.booleans()) else None)
    packed = pack_rows(
        [e for e, is_sent in zip(sent, presence, strict=True) if is_sent]
    )

    read = unpack_rows(
        # Of a received message, at any place of it.
        memoryview(b"x" + packed)[1:],
        chunk_of(*(piece for piece, _, _ in tables)),
        presence,
        [row_length for _, row_length, _ in tables],
    )

    for ours, theirs, is_sent in zip(sent, read, presence, strict=True):
        if ours is None or not is_sent:
            assert theirs is None
        else:
            assert theirs is not None
            assert theirs.rows.tolist() == ours.rows.tolist()
            assert theirs.positions().tolist() == ours.positions().tolist()


def outcome(read: Callable[[], ChunkRows]) -> ChunkRows | Refusal:
    """What reading gives; any exception but a refusal fails the test."""
    try:
        return read()
    except Refusal as refusal:
        return refusal


@checked
@given(st.data())
def test_hostile_row_indices_are_read_as_valid_rows_or_refused(
    data: st.DataObject,
) -> None:
    tables = [data.draw(slices_of_tables(index)) for index in range(2)]
    numbers = st.integers(-3, 12) | st.sampled_from([-(2**63), 2**63 - 1, 2**60])
    packed = b"".join(
        data.draw(numbers).to_bytes(8, "little", signed=True)
        for _ in range(data.draw(st.integers(0, 9)))
    ) + data.draw(st.binary(max_size=2))

    read = outcome(
        lambda: unpack_rows(
            packed,
            chunk_of(*(piece for piece, _, _ in tables)),
            (True, True),
            [row_length for _, row_length, _ in tables],
        )
    )
    if isinstance(read, Refusal):
        allowed = {ErrorReason.MALFORMED_MESSAGE, ErrorReason.CHUNK_INVALID}
        assert read.reason in allowed
        return
    assert pack_rows(read) == packed
    for found, (piece, row_length, _) in zip(read, tables, strict=True):
        if found is not None:
            assert found.positions().tolist() == elements(piece, row_length, found.rows)
            assert len(set(found.rows)) == len(found.rows)


def packed_numbers(*numbers: int) -> bytes:
    return b"".join(each.to_bytes(8, "little", signed=True) for each in numbers)


@pytest.mark.parametrize(
    ("row_indices", "reason", "text"),
    [
        (
            packed_numbers(-1),
            ErrorReason.MALFORMED_MESSAGE,
            "the row indices of chunk 4 end at byte 8, before those of all slices",
        ),
        (
            packed_numbers(-1, -2),
            ErrorReason.MALFORMED_MESSAGE,
            "the row indices of chunk 4 announce -2 rows at byte 8",
        ),
        (
            packed_numbers(-1, 2, 2),
            ErrorReason.MALFORMED_MESSAGE,
            "the row indices of chunk 4 announce 2 rows at byte 8, and 8 bytes follow",
        ),
        (
            packed_numbers(-1, 2**62),
            ErrorReason.MALFORMED_MESSAGE,
            "the row indices of chunk 4 announce 4611686018427387904 rows at byte 8, "
            "and 0 bytes follow",
        ),
        (
            packed_numbers(0, 0, 0),
            ErrorReason.MALFORMED_MESSAGE,
            "the row indices of chunk 4 go on for 8 bytes after the last slice",
        ),
        (
            packed_numbers(0, 2, 3, 2),
            ErrorReason.CHUNK_INVALID,
            "the rows of a slice of tensor 1 are not sorted and unique",
        ),
        (
            packed_numbers(0, 2, 2, 2),
            ErrorReason.CHUNK_INVALID,
            "the rows of a slice of tensor 1 are not sorted and unique",
        ),
        (
            packed_numbers(0, 1, 1),
            ErrorReason.CHUNK_INVALID,
            "rows 1 to 1 of a slice of tensor 1 came, and rows 2 to 3 lie in it",
        ),
        (
            packed_numbers(0, 2, 3, 4),
            ErrorReason.CHUNK_INVALID,
            "rows 3 to 4 of a slice of tensor 1 came, and rows 2 to 3 lie in it",
        ),
        (
            packed_numbers(0, 2, -(2**63), 2**63 - 1),
            ErrorReason.CHUNK_INVALID,
            "rows -9223372036854775808 to 9223372036854775807 of a slice of tensor 1 "
            "came, and rows 2 to 3 lie in it",
        ),
    ],
)
def test_wrong_row_indices_are_refused_by_what_and_where(
    row_indices: bytes, reason: ErrorReason, text: str
) -> None:
    chunk = chunk_of(Slice(0, 0, 5), Slice(1, 6, 11))
    with pytest.raises(Refusal) as caught:
        unpack_rows(row_indices, chunk, (True, True), (1, 3))
    assert caught.value.reason is reason
    assert caught.value.message == text
