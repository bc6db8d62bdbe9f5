"""What is kept for a worker on a shard, and what is left of it when it ends."""

import pytest
import torch

from psserver.shard.core.push import PushId
from psserver.shard.host.hosted_members import (
    HostedMembers,
    PeerWait,
    StagedState,
)
from psserver.shard.host.push_session import ProvisionalChunks, PushSession
from pswire.membership import Mode
from pswire.reasons import Refusal
from tests.doubles.core_values import key, record

A, B = key("a"), key("b")


def members_of(*names: str, mode: Mode = Mode.ASP) -> HostedMembers:
    members = HostedMembers()
    members.follow(record(dict.fromkeys(names, 0), mode=mode), lambda _: 0)
    return members


def session() -> PushSession:
    return PushSession(wants_values=True, opened_ms=1)


def test_who_ends_leaves_nothing_but_its_open_calls() -> None:
    members = members_of("a", "b")
    kept = members.of(A)
    kept.begin_call(ProvisionalChunks(PushId(A, 1), session()))
    carrying = session()
    kept.attach(1, carrying)
    kept.has_contradicted = True
    assert kept.sent is not None
    kept.sent.note_copy(0, torch.zeros(3))

    members.follow(record({"b": 0}, generation=2, mode=Mode.ASP), lambda _: 0)

    left = members.of(A)
    assert left.sent is left.ahead is None
    assert not left.has_contradicted
    assert members.session_of(PushId(A, 1)) is carrying
    left.end_call(1, carrying)
    left.calls.clear()
    members.follow(record({"b": 0}, generation=3, mode=Mode.ASP), lambda _: 0)
    assert [each.worker for each in members] == [B]


def test_what_was_sent_ahead_ends_with_its_worker() -> None:
    members = members_of("a")
    ahead = ProvisionalChunks(PushId(A, 1), session())
    members.of(A).begin_call(ahead)

    members.follow(record({"b": 0}, generation=2), lambda _: 0)

    assert ahead.is_ended
    with pytest.raises(Refusal, match="what it sent ahead is dropped"):
        ahead.session.check()


@pytest.mark.parametrize("last_sequence", [3, 4])
def test_state_stays_while_the_push_that_loads_it_counts(last_sequence: int) -> None:
    members = members_of("a")
    members.of(A).state = StagedState(4, "optimizer", {})

    members.follow(record({"b": 0}, generation=2), lambda _: last_sequence)

    is_kept = members.of(A).state_of(4, "optimizer") is not None
    assert is_kept is (last_sequence == 4)
    members.of(A).drop_state(4)
    assert members.of(A).state is None


def test_with_clocks_no_copies_of_values_are_kept() -> None:
    members = members_of("a")
    sent = members.sent_to(A)
    assert sent is not None
    assert sent.copies is not None

    members.follow(record({"a": 0}, generation=2, mode=Mode.BSP), lambda _: 0)

    assert members.sent_to(A) is sent
    assert sent.copies is None


def test_a_push_waits_until_the_last_one_of_its_clock_is_there() -> None:
    first, last = PeerWait(), PeerWait()
    first.note_complete(10.0)
    first.note_complete(11.0)  # said again, as by another call
    assert first.total_s(12.0) == 2.0
    last.note_complete(13.0)
    for each in (first, last):
        each.note_done(13.5, last_complete_s=13.0)
        each.note_answered(13.6)
    assert (first.total_s(20.0), last.total_s(20.0)) == (3.0, 0.0)


def test_an_answer_that_is_held_back_for_the_bound_is_a_wait_too() -> None:
    wait = PeerWait()
    wait.note_complete(10.0)
    wait.note_done(10.5, last_complete_s=None)
    assert wait.total_s(12.5) == 2.0
    wait.note_answered(13.5)
    assert wait.total_s(20.0) == 3.0
    wait.note_answered(21.0)
    assert wait.total_s(30.0) == 3.0


def test_a_member_hears_of_each_wait_once() -> None:
    wait = PeerWait()
    wait.note_complete(10.0)
    wait.note_done(14.0, last_complete_s=13.0)
    assert wait.take_news() == 3.0
    assert wait.take_news() == 0.0
    wait.note_complete(20.0)
    wait.note_done(21.5, last_complete_s=21.0)
    assert wait.take_news() == 1.0
    assert wait.total_s(30.0) == 4.0
