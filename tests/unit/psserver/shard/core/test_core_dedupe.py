"""A push changes a shard at most once, whatever is sent again."""

import copy

import pytest

from psserver.shard.core.push import ChunkState, PushEntry, PushWindow
from pswire.membership import Outcome
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import chunk, key, trailer
from tests.refusals import refused

A = key("a")


def opened(window: PushWindow, sequence: int) -> PushEntry:
    entry = window.open(sequence)
    assert entry is not None
    return entry


def reason_of(caught: pytest.ExceptionInfo[Refusal]) -> ErrorReason:
    return caught.value.reason


def test_the_same_bytes_again_are_no_news() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)

    assert entry.add_chunk(3, chunk(b"x"))
    assert not entry.add_chunk(3, chunk(b"x"))
    assert entry.add_trailer(trailer([3]))
    assert not entry.add_trailer(trailer([3]))


def test_other_bytes_under_the_same_id_are_refused() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    entry.add_chunk(3, chunk(b"x"))

    with pytest.raises(Refusal, match="chunk 3 differs") as caught:
        entry.add_chunk(3, chunk(b"y"))
    assert reason_of(caught) is ErrorReason.PUSH_CONFLICT


def test_other_bytes_are_refused_after_the_push_is_done_too() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    entry.add_chunk(3, chunk(b"x"))
    entry.add_trailer(trailer([3]))
    window.finish(1, Outcome.APPLIED)

    assert not opened(window, 1).add_chunk(3, chunk(b"x"))
    with pytest.raises(Refusal) as caught:
        opened(window, 1).add_chunk(3, chunk(b"y"))
    assert reason_of(caught) is ErrorReason.PUSH_CONFLICT


def test_another_trailer_under_the_same_id_is_refused() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    entry.add_trailer(trailer([3], weight=1.0))

    with pytest.raises(Refusal, match="trailer differs") as caught:
        entry.add_trailer(trailer([3], weight=2.0))
    assert reason_of(caught) is ErrorReason.PUSH_CONFLICT


def test_a_trailer_that_leaves_out_a_received_chunk_is_refused() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    entry.add_chunk(3, chunk(b"x"))

    with pytest.raises(Refusal, match="leaves out chunk 3") as caught:
        entry.add_trailer(trailer([4]))
    assert reason_of(caught) is ErrorReason.PUSH_CONFLICT


def test_a_chunk_that_the_trailer_left_out_is_refused() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    entry.add_trailer(trailer([4]))

    with pytest.raises(Refusal, match="chunk 3") as caught:
        entry.add_chunk(3, chunk(b"x"))
    assert reason_of(caught) is ErrorReason.CHUNK_INVALID


@pytest.mark.parametrize("sequence", [0, -1, 2, 1 << 62])
def test_a_push_that_is_not_the_next_one_is_refused(sequence: int) -> None:
    with pytest.raises(Refusal) as caught:
        PushWindow(A).open(sequence)
    assert reason_of(caught) is ErrorReason.SEQUENCE_GAP
    assert caught.value.facts == {"sequence": str(sequence), "sequence_done_max": "0"}


def test_the_next_push_must_wait_for_the_one_before() -> None:
    window = PushWindow(A)
    opened(window, 1)
    with pytest.raises(Refusal):
        window.open(2)
    window.finish(1, Outcome.APPLIED)
    opened(window, 2)


def test_no_refusal_changes_anything() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    entry.add_chunk(3, chunk(b"x"))
    entry.add_trailer(trailer([3, 4]))
    before = copy.deepcopy(window)

    for offence in (
        lambda: window.open(7),
        lambda: window.open(0),
        lambda: entry.add_chunk(3, chunk(b"y")),
        lambda: entry.add_chunk(9, chunk(b"x")),
        lambda: entry.add_trailer(trailer([3])),
    ):
        with pytest.raises(Refusal):
            offence()
    assert window == before


def test_a_done_push_is_kept_until_it_is_acknowledged() -> None:
    window = PushWindow(A)
    opened(window, 1)
    window.finish(1, Outcome.APPLIED)
    opened(window, 1)

    window.acknowledge(1)
    opened(window, 1)
    window.acknowledge(2)

    assert window.open(1) is None
    assert window.entries == {}


def test_an_unfinished_push_is_never_acknowledged_away() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    entry.add_chunk(3, chunk(b"x"))

    window.acknowledge(1 << 62)

    assert window.open(1) is entry


def test_a_done_push_gives_back_its_bytes_and_keeps_its_digests() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    entry.add_chunk(3, chunk(b"x"))
    entry.add_trailer(trailer([3]))

    window.finish(1, Outcome.SKIPPED, ("b",))

    assert entry.staged == {}
    assert set(entry.digests) == {3}
    assert (entry.outcome, entry.nonfinite_worker_ids) == (Outcome.SKIPPED, ("b",))


def test_a_chunk_of_a_done_push_stages_nothing() -> None:
    window = PushWindow(A)
    window.finish(1, Outcome.SKIPPED)
    entry = opened(window, 1)

    assert not entry.add_chunk(3, chunk(b"late"))
    assert entry.staged == {}


def test_a_chunk_is_absent_then_staged_then_applied() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    states = [entry.state_of(3)]
    entry.add_chunk(3, chunk(b"x"))
    states.append(entry.state_of(3))
    del entry.staged[3]
    entry.applied.add(3)
    states.append(entry.state_of(3))

    assert states == [ChunkState.ABSENT, ChunkState.STAGED, ChunkState.APPLIED]


def test_a_push_is_complete_with_its_trailer_and_all_its_chunks() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    entry.add_chunk(3, chunk(b"x"))
    assert not entry.is_complete
    entry.add_trailer(trailer([3, 4]))
    assert not entry.is_complete
    entry.add_chunk(4, chunk(b"x"))
    assert entry.is_complete


def test_what_came_after_the_last_push_of_a_closed_start_is_thrown_away() -> None:
    window = PushWindow(A)
    window.finish(1, Outcome.APPLIED)
    entry = opened(window, 2)

    assert window.discard_after(1) == {2: entry}
    assert set(window.entries) == {1}
    assert window.discard_after(1) == {}


def test_a_trailer_and_what_went_ahead_of_it_are_one_change() -> None:
    window = PushWindow(A)
    entry = opened(window, 1)

    new = entry.add_push(trailer((3, 4)), {3: chunk(b"x"), 9: chunk(b"gone")})

    assert new == [3]
    assert set(entry.staged) == {3}
    assert not entry.is_complete
    assert entry.add_push(trailer((3, 4)), {3: chunk(b"x"), 4: chunk(b"y")}) == [4]
    assert entry.is_complete


@pytest.mark.parametrize(
    ("indexes", "sent"), [((3, 4), b"other"), ((3,), b"x")], ids=["chunk", "trailer"]
)
def test_what_went_ahead_under_the_id_of_another_push_changes_nothing(
    indexes: tuple[int, ...], sent: bytes
) -> None:
    window = PushWindow(A)
    entry = opened(window, 1)
    entry.add_push(trailer((3, 4)), {4: chunk(b"x")})

    with refused(ErrorReason.PUSH_CONFLICT):
        entry.add_push(trailer(indexes), {3: chunk(b"y"), 4: chunk(sent)})

    assert set(entry.digests) == {4}
    assert entry.trailer == trailer((3, 4))


def test_bytes_that_came_before_need_not_be_looked_up() -> None:
    window = PushWindow(A)
    assert not window.has_chunk(1, 3, chunk(b"x").digest)
    entry = opened(window, 1)
    entry.add_chunk(3, chunk(b"x"))

    assert window.has_chunk(1, 3, chunk(b"x").digest)
    assert not window.has_chunk(1, 3, chunk(b"y").digest)
    assert not window.has_chunk(1, 4, chunk(b"x").digest)
    assert not window.has_chunk(2, 3, chunk(b"x").digest)


def test_nothing_of_a_push_that_is_done_needs_to_be_looked_up() -> None:
    window = PushWindow(A)
    opened(window, 1).add_chunk(3, chunk(b"x"))
    window.finish(1, Outcome.DROPPED)

    assert window.has_chunk(1, 3, chunk(b"x").digest)
    assert window.has_chunk(1, 4, chunk(b"x").digest)
    assert not window.has_chunk(1, 3, chunk(b"y").digest)  # a conflict: look at it
    window.shrink()
    assert window.has_chunk(1, 3, chunk(b"x").digest)
    window.acknowledge(2)
    assert window.has_chunk(1, 3, chunk(b"x").digest)
