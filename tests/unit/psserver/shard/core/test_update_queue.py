"""Updates of a chunk take turns; chunks do not wait for each other."""

from psserver.shard.core.push import PushId
from psserver.shard.core.push_progress import UpdateQueue
from tests.doubles.core_values import push_id

A, B, C = push_id("a"), push_id("b"), push_id("c")


def take_all(queue: UpdateQueue) -> list[tuple[int, PushId]]:
    """Updates whose turn it is."""
    taken = [(index, queue.take(index)) for index in queue.waiting]
    return [(index, push) for index, push in taken if push is not None]


def test_a_chunk_is_given_to_one_push_at_a_time() -> None:
    queue = UpdateQueue()
    queue.enqueue(0, A)
    queue.enqueue(0, B)

    assert take_all(queue) == [(0, A)]
    assert take_all(queue) == []
    assert queue.applied(0) == A
    assert take_all(queue) == [(0, B)]


def test_turns_come_in_the_order_of_arrival() -> None:
    queue = UpdateQueue()
    for push in (C, A, B):
        queue.enqueue(0, push)

    order = []
    while ready := take_all(queue):
        order += ready
        queue.applied(0)

    assert order == [(0, C), (0, A), (0, B)]


def test_chunks_do_not_wait_for_each_other() -> None:
    queue = UpdateQueue()
    queue.enqueue(0, A)
    queue.enqueue(1, B)
    queue.enqueue(1, A)

    assert sorted(take_all(queue)) == [(0, A), (1, B)]
    assert queue.applied(1) == B
    assert take_all(queue) == [(1, A)]
    assert queue.applying == {0: A, 1: A}


def test_a_push_that_does_not_count_loses_all_its_turns() -> None:
    queue = UpdateQueue()
    for chunk_index in (0, 1):
        for push in (A, B):
            queue.enqueue(chunk_index, push)
    queue.enqueue(2, B)
    take_all(queue)
    for chunk_index in (0, 1, 2):
        queue.applied(chunk_index)

    queue.discard(B)
    queue.enqueue(0, C)

    assert take_all(queue) == [(0, C)]
