"""A chunk is released when every contributor's part of it is there."""

from psserver.shard.core.clock_progress import OpenClock
from psserver.shard.core.push import PushEntry
from pswire.membership import WorkerKey
from tests.doubles.core_values import chunk, key, trailer

A, B = key("a"), key("b")


def entry(*sent: int, received: tuple[int, ...] = (), weight: float = 1.0) -> PushEntry:
    made = PushEntry(trailer=trailer(sent, weight=weight))
    for index in received:
        made.digests[index] = 0
        made.staged[index] = chunk()
    return made


def armed(entries: dict[WorkerKey, PushEntry], *chunk_indexes: int) -> OpenClock:
    clock = OpenClock(1)
    clock.arm(entries, chunk_indexes, trailer())
    return clock


def test_nothing_is_ready_before_all_trailers_are_in() -> None:
    clock = OpenClock(1)

    clock.note_chunk(A, 0)

    assert clock.take_ready() == []
    assert not clock.is_done


def test_a_chunk_is_ready_once_everybody_who_sends_it_has() -> None:
    clock = armed({A: entry(0, received=(0,)), B: entry(0)}, 0)
    assert clock.take_ready() == []
    clock.note_chunk(B, 0)
    assert clock.take_ready() == [0]


def test_a_chunk_does_not_wait_for_those_who_do_not_send_it() -> None:
    clock = armed({A: entry(0, 1, received=(0,)), B: entry(1)}, 0, 1)

    assert clock.take_ready() == [0]


def test_a_chunk_is_handed_out_once() -> None:
    clock = armed({A: entry(0, received=(0,))}, 0)

    assert [clock.take_ready(), clock.take_ready()] == [[0], []]


def test_only_the_chunks_asked_for_are_looked_at() -> None:
    clock = armed({A: entry(0, 1, received=(0, 1))}, 0, 1)

    assert clock.take_ready([1, 7]) == [1]


def test_chunks_that_nobody_sends_are_done_at_once() -> None:
    clock = armed({A: entry()}, 0, 1)

    assert clock.is_done
    assert clock.applied == {0, 1}


def test_chunks_of_weight_0_count_as_sent_by_nobody() -> None:
    clock = armed({A: entry(0, received=(0,), weight=0.0)}, 0)

    assert clock.is_done


def test_a_clock_is_done_when_the_last_chunk_is_applied() -> None:
    clock = armed({A: entry(0, received=(0,))}, 0)
    clock.take_ready()
    assert not clock.is_done
    clock.applying.discard(0)
    clock.applied.add(0)
    assert clock.is_done


def test_armed_again_it_does_not_apply_a_chunk_twice() -> None:
    entries = {A: entry(0, 1, received=(0, 1)), B: entry(0, 1, received=(0,))}
    clock = armed(entries, 0, 1)
    assert clock.take_ready() == [0]
    clock.applying.clear()
    clock.applied.add(0)

    clock.disarm()
    assert not clock.is_armed
    del entries[B]
    clock.arm(entries, (0, 1), trailer())

    assert clock.take_ready() == [1]
