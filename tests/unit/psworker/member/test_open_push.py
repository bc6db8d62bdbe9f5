"""What follows from a failed call of a push, and from what shards have staged."""

import pytest

from pswire.aggregation import UpdateRules
from pswire.membership import ClockChoice, WorkerKey
from pswire.reasons import ErrorReason
from psworker.member.core import Ask, Choose, Commit, OpenPush, Send
from psworker.transport.values import ShardSession

ME = WorkerKey("w0", 1)
OTHER = WorkerKey("w1", 1)
BOTH = ClockChoice(5, (ME, OTHER))
ALONE = ClockChoice(5, (ME,))


def opened(clip_grad_norm: float = 0.0) -> OpenPush:
    """Push 3 to two shards: chunks 0 and 1 to the first, none to the other."""
    update = UpdateRules(clip_grad_norm=clip_grad_norm)
    return OpenPush(ME, 3, [(0, 1), ()], update=update)


def test_a_push_is_sent_at_once() -> None:
    assert opened().begin() == Send(frozenset(), is_first=True)


def test_a_push_that_another_process_may_have_sent_is_asked_for_first() -> None:
    assert opened().begin(asks_first=True) == Ask(0)


def test_a_call_that_failed_is_followed_by_a_question_each_time() -> None:
    push = opened()

    asked = [push.failed(0, None, is_retryable=True) for _ in range(5)]

    assert asked == [Ask(1), Ask(2), Ask(3), Ask(4), Ask(5)]
    assert push.failed(1, None, is_retryable=True) == Ask(1)


def test_a_refusal_stands() -> None:
    reason = ErrorReason.OPTIMIZER_OUT_OF_PHASE

    assert opened().failed(0, reason, is_retryable=False) is None


def test_bytes_that_change_on_their_way_are_sent_four_times() -> None:
    push, reason = opened(), ErrorReason.CHUNK_DIGEST_MISMATCH

    asked = [push.failed(0, reason, is_retryable=True) for _ in range(4)]

    assert asked == [Ask(1), Ask(2), Ask(3), None]


@pytest.mark.parametrize(
    ("session", "held"),
    [
        (ShardSession(2), frozenset[int]()),
        (ShardSession(2, {3: frozenset({1})}), frozenset({1})),
        (ShardSession(2, {4: frozenset({1})}), frozenset[int]()),
        (ShardSession(3), frozenset({0, 1})),
        (ShardSession(7), frozenset({0, 1})),
    ],
)
def test_what_a_shard_has_is_not_sent_again(
    session: ShardSession, held: frozenset[int]
) -> None:
    assert opened().found(0, session) == Send(held)


def test_what_all_shards_have_staged_is_committed() -> None:
    push = opened()

    assert push.staged(1, BOTH) is None
    assert push.staged(0, BOTH) == Commit(BOTH)


def test_shards_that_differ_are_sent_nothing_until_they_agree() -> None:
    push = opened()

    assert push.staged(0, BOTH) is None
    assert push.staged(1, ALONE) is None
    assert push.staged(0, ALONE) == Commit(ALONE)


def test_a_clock_of_other_shards_is_no_agreement() -> None:
    push = opened()
    push.staged(0, BOTH)

    assert push.staged(1, BOTH._replace(clock=6)) is None


def test_a_shard_that_says_it_again_gets_the_commit_again() -> None:
    push = opened()
    push.staged(0, BOTH)
    push.staged(1, BOTH)

    assert push.staged(1, BOTH) == Commit(BOTH)


def test_what_one_shard_is_done_with_is_committed_on_the_others() -> None:
    """Who committed it there was lost before it did the same elsewhere."""
    push, own = opened(), ClockChoice(5, ())
    assert push.staged(1, BOTH) is None

    assert push.staged(0, own) == Choose(5, 3)
    assert push.chosen(BOTH) == Commit(BOTH)


def test_what_all_shards_are_done_with_needs_no_commit() -> None:
    push = opened()
    for shard_index in (0, 1):
        push.found(shard_index, ShardSession(3))

    assert push.staged(0, BOTH) is None
    assert push.staged(1, BOTH) is None


def test_shards_that_have_heard_who_counts_are_given_time_to_measure() -> None:
    push, own = opened(clip_grad_norm=1.0), ClockChoice(5, ())
    for shard_index in (0, 1):
        push.staged(shard_index, own)
    assert push.chosen(BOTH) == Commit(BOTH)

    assert push.staged(0, BOTH._replace(sum_of_squares=8.0)) is None
    assert push.staged(1, own) == Choose(5, 3)  # it has forgotten


def test_with_backup_workers_shard_0_chooses_and_the_chosen_commit() -> None:
    push, own = opened(), ClockChoice(5, ())
    push.staged(0, own)

    assert push.staged(1, own) == Choose(5, 3)
    assert push.chosen(BOTH) == Commit(BOTH)
    assert push.chosen(ClockChoice(5, (OTHER,))) is None


def test_in_mode_quorum_one_that_was_not_chosen_commits_too() -> None:
    """Those that were chosen may all be stopped."""
    push = OpenPush(ME, 3, [(0, 1), ()], drives_others=True)
    others = ClockChoice(5, (OTHER,))

    assert push.chosen(others) == Commit(others)
    assert push.chosen(ClockChoice(5, ())) is None  # it is closed already


def test_the_scale_follows_from_what_all_shards_have_measured() -> None:
    push = opened(clip_grad_norm=1.5)
    parts = tuple(BOTH._replace(sum_of_squares=each) for each in (1.0, 8.0))
    push.staged(1, parts[1])

    step = push.staged(0, parts[0])

    scale = 1.5 / (3.0 + 1e-6)
    assert step == Commit(
        BOTH._replace(sum_of_squares=9.0, gradient_scale=scale, parts=parts)
    )


def test_what_is_measured_anew_replaces_what_was_said() -> None:
    push = opened(clip_grad_norm=10.0)
    for shard_index in (0, 1):
        push.staged(shard_index, BOTH._replace(sum_of_squares=8.0))

    part = ALONE._replace(sum_of_squares=2.0)
    push.staged(0, part)
    step = push.staged(1, part)

    assert step == Commit(
        ALONE._replace(sum_of_squares=4.0, gradient_scale=1.0, parts=(part, part))
    )
