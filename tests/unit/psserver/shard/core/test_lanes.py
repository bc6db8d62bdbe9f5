"""Updates of a chunk take turns; chunks do not wait for each other."""

from psserver.edge.push import PushId
from psserver.shard.core.lanes import Lanes
from tests.doubles.core_values import push_id

A, B, C = push_id("a"), push_id("b"), push_id("c")


def take_all(lanes: Lanes) -> list[tuple[int, PushId]]:
    """Updates whose turn it is."""
    taken = [(index, lanes.take(index)) for index in lanes.waiting]
    return [(index, push) for index, push in taken if push is not None]


def test_a_chunk_is_given_to_one_push_at_a_time() -> None:
    lanes = Lanes()
    lanes.enqueue(0, A)
    lanes.enqueue(0, B)

    assert take_all(lanes) == [(0, A)]
    assert take_all(lanes) == []
    assert lanes.applied(0) == A
    assert take_all(lanes) == [(0, B)]


def test_turns_come_in_the_order_of_arrival() -> None:
    lanes = Lanes()
    for push in (C, A, B):
        lanes.enqueue(0, push)

    order = []
    while ready := take_all(lanes):
        order += ready
        lanes.applied(0)

    assert order == [(0, C), (0, A), (0, B)]


def test_chunks_do_not_wait_for_each_other() -> None:
    lanes = Lanes()
    lanes.enqueue(0, A)
    lanes.enqueue(1, B)
    lanes.enqueue(1, A)

    assert sorted(take_all(lanes)) == [(0, A), (1, B)]
    assert lanes.applied(1) == B
    assert take_all(lanes) == [(1, A)]
    assert lanes.applying == {0: A, 1: A}


def test_a_push_that_does_not_count_loses_all_its_turns() -> None:
    lanes = Lanes()
    for chunk_index in (0, 1):
        for push in (A, B):
            lanes.enqueue(chunk_index, push)
    lanes.enqueue(2, B)
    take_all(lanes)
    for chunk_index in (0, 1, 2):
        lanes.applied(chunk_index)

    lanes.discard(B)
    lanes.enqueue(0, C)

    assert take_all(lanes) == [(0, C)]
