"""A push changes a shard at most once, whatever is sent again."""

import copy

import pytest

from psserver.shard.core.dedupe import ChunkState, DedupeTable, PushEntry
from psserver.shard.core.push import PushId
from pswire.outcome import Outcome
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import chunk, key, trailer

A = key("a")


def opened(table: DedupeTable, sequence: int) -> PushEntry:
    entry = table.open(A, sequence)
    assert entry is not None
    return entry


def reason_of(caught: pytest.ExceptionInfo[Refusal]) -> ErrorReason:
    return caught.value.reason


def test_the_same_bytes_again_are_no_news() -> None:
    table = DedupeTable()
    entry = opened(table, 1)

    assert table.add_chunk(entry, 3, chunk(b"x"))
    assert not table.add_chunk(entry, 3, chunk(b"x"))
    assert table.add_trailer(entry, trailer([3]))
    assert not table.add_trailer(entry, trailer([3]))


def test_other_bytes_under_the_same_id_are_refused() -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    table.add_chunk(entry, 3, chunk(b"x"))

    with pytest.raises(Refusal, match="chunk 3 differs") as caught:
        table.add_chunk(entry, 3, chunk(b"y"))
    assert reason_of(caught) is ErrorReason.PUSH_CONFLICT


def test_other_bytes_are_refused_after_the_push_is_done_too() -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    table.add_chunk(entry, 3, chunk(b"x"))
    table.add_trailer(entry, trailer([3]))
    table.finish(A, 1, Outcome.APPLIED)

    assert not table.add_chunk(opened(table, 1), 3, chunk(b"x"))
    with pytest.raises(Refusal) as caught:
        table.add_chunk(opened(table, 1), 3, chunk(b"y"))
    assert reason_of(caught) is ErrorReason.PUSH_CONFLICT


def test_another_trailer_under_the_same_id_is_refused() -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    table.add_trailer(entry, trailer([3], weight=1.0))

    with pytest.raises(Refusal, match="trailer differs") as caught:
        table.add_trailer(entry, trailer([3], weight=2.0))
    assert reason_of(caught) is ErrorReason.PUSH_CONFLICT


def test_a_trailer_that_leaves_out_a_received_chunk_is_refused() -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    table.add_chunk(entry, 3, chunk(b"x"))

    with pytest.raises(Refusal, match="leaves out chunk 3") as caught:
        table.add_trailer(entry, trailer([4]))
    assert reason_of(caught) is ErrorReason.PUSH_CONFLICT


def test_a_chunk_that_the_trailer_left_out_is_refused() -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    table.add_trailer(entry, trailer([4]))

    with pytest.raises(Refusal, match="chunk 3") as caught:
        table.add_chunk(entry, 3, chunk(b"x"))
    assert reason_of(caught) is ErrorReason.CHUNK_INVALID


@pytest.mark.parametrize("sequence", [0, -1, 2, 1 << 62])
def test_a_push_that_is_not_the_next_one_is_refused(sequence: int) -> None:
    with pytest.raises(Refusal) as caught:
        DedupeTable().open(A, sequence)
    assert reason_of(caught) is ErrorReason.SEQUENCE_GAP
    assert caught.value.facts == {"sequence": str(sequence), "sequence_done_max": "0"}


def test_the_next_push_must_wait_for_the_one_before() -> None:
    table = DedupeTable()
    opened(table, 1)
    with pytest.raises(Refusal):
        table.open(A, 2)
    table.finish(A, 1, Outcome.APPLIED)
    opened(table, 2)


def test_no_refusal_changes_anything() -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    table.add_chunk(entry, 3, chunk(b"x"))
    table.add_trailer(entry, trailer([3, 4]))
    before = copy.deepcopy(table.window(A))

    for offence in (
        lambda: table.open(A, 7),
        lambda: table.open(A, 0),
        lambda: table.add_chunk(entry, 3, chunk(b"y")),
        lambda: table.add_chunk(entry, 9, chunk(b"x")),
        lambda: table.add_trailer(entry, trailer([3])),
    ):
        with pytest.raises(Refusal):
            offence()
    assert table.window(A) == before


def test_a_done_push_is_kept_until_it_is_acknowledged() -> None:
    table = DedupeTable()
    opened(table, 1)
    table.finish(A, 1, Outcome.APPLIED)
    opened(table, 1)

    table.acknowledge(A, 1)
    opened(table, 1)
    table.acknowledge(A, 2)

    assert table.open(A, 1) is None
    assert table.window(A).entries == {}


def test_an_unfinished_push_is_never_acknowledged_away() -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    table.add_chunk(entry, 3, chunk(b"x"))

    table.acknowledge(A, 1 << 62)

    assert table.open(A, 1) is entry


def test_a_done_push_gives_back_its_bytes_and_keeps_its_digests() -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    table.add_chunk(entry, 3, chunk(b"x"))
    table.add_trailer(entry, trailer([3]))

    table.finish(A, 1, Outcome.SKIPPED, ("b",))

    assert entry.staged == {}
    assert set(entry.digests) == {3}
    assert (entry.outcome, entry.nonfinite_worker_ids) == (Outcome.SKIPPED, ("b",))


def test_a_chunk_of_a_done_push_stages_nothing() -> None:
    table = DedupeTable()
    table.finish(A, 1, Outcome.SKIPPED)
    entry = opened(table, 1)

    assert not table.add_chunk(entry, 3, chunk(b"late"))
    assert entry.staged == {}


def test_a_chunk_is_absent_then_staged_then_applied() -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    states = [entry.state_of(3)]
    table.add_chunk(entry, 3, chunk(b"x"))
    states.append(entry.state_of(3))
    del entry.staged[3]
    entry.applied.add(3)
    states.append(entry.state_of(3))

    assert states == [ChunkState.ABSENT, ChunkState.STAGED, ChunkState.APPLIED]


def test_a_push_is_complete_with_its_trailer_and_all_its_chunks() -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    table.add_chunk(entry, 3, chunk(b"x"))
    assert not entry.is_complete
    table.add_trailer(entry, trailer([3, 4]))
    assert not entry.is_complete
    table.add_chunk(entry, 4, chunk(b"x"))
    assert entry.is_complete


def test_looking_at_a_worker_remembers_nothing() -> None:
    table = DedupeTable()
    assert table.window_of(A).done_sequence == 0
    assert table.window_of(A) is not table.window_of(A)


def test_incarnations_have_windows_of_their_own() -> None:
    table = DedupeTable()
    opened(table, 1)
    table.finish(A, 1, Outcome.APPLIED)

    assert table.window_of(key("a/2")).done_sequence == 0


def test_what_came_after_the_last_push_of_a_closed_start_is_thrown_away() -> None:
    table = DedupeTable()
    table.finish(A, 1, Outcome.APPLIED)
    entry = opened(table, 2)

    assert table.discard_after(A, 1) == {2: entry}
    assert set(table.window(A).entries) == {1}
    assert table.discard_after(A, 1) == {}


def test_a_trailer_and_what_went_ahead_of_it_are_one_change() -> None:
    table = DedupeTable()
    entry = opened(table, 1)

    new = table.add_push(entry, trailer((3, 4)), {3: chunk(b"x"), 9: chunk(b"gone")})

    assert new == [3]
    assert set(entry.staged) == {3}
    assert not entry.is_complete
    assert table.add_push(entry, trailer((3, 4)), {3: chunk(b"x"), 4: chunk(b"y")}) == [
        4
    ]
    assert entry.is_complete


@pytest.mark.parametrize(
    ("indexes", "sent"), [((3, 4), b"other"), ((3,), b"x")], ids=["chunk", "trailer"]
)
def test_what_went_ahead_under_the_id_of_another_push_changes_nothing(
    indexes: tuple[int, ...], sent: bytes
) -> None:
    table = DedupeTable()
    entry = opened(table, 1)
    table.add_push(entry, trailer((3, 4)), {4: chunk(b"x")})

    with pytest.raises(Refusal) as refused:
        table.add_push(entry, trailer(indexes), {3: chunk(b"y"), 4: chunk(sent)})

    assert refused.value.reason == ErrorReason.PUSH_CONFLICT
    assert set(entry.digests) == {4}
    assert entry.trailer == trailer((3, 4))


def test_bytes_that_came_before_need_not_be_looked_up() -> None:
    table = DedupeTable()
    push = PushId(A, 1)
    assert not table.has_chunk(push, 3, chunk(b"x").digest)
    entry = opened(table, 1)
    table.add_chunk(entry, 3, chunk(b"x"))

    assert table.has_chunk(push, 3, chunk(b"x").digest)
    assert not table.has_chunk(push, 3, chunk(b"y").digest)
    assert not table.has_chunk(push, 4, chunk(b"x").digest)
    assert not table.has_chunk(PushId(A, 2), 3, chunk(b"x").digest)
    assert not table.has_chunk(PushId(key("b"), 1), 3, chunk(b"x").digest)


def test_nothing_of_a_push_that_is_done_needs_to_be_looked_up() -> None:
    table = DedupeTable()
    push = PushId(A, 1)
    table.add_chunk(opened(table, 1), 3, chunk(b"x"))
    table.finish(A, 1, Outcome.DROPPED)

    assert table.has_chunk(push, 3, chunk(b"x").digest)
    assert table.has_chunk(push, 4, chunk(b"x").digest)
    assert not table.has_chunk(push, 3, chunk(b"y").digest)  # a conflict: look at it
    table.shrink(A)
    assert table.has_chunk(push, 3, chunk(b"x").digest)
    table.acknowledge(A, 2)
    assert table.has_chunk(push, 3, chunk(b"x").digest)
