"""Who is the longest member, and what a record says of its members."""

import pytest

from pswire.membership import FenceKind, Member, Record, WorkerKey, longest_of


def member(name: str, base_clock: int, base_sequence: int = 0) -> Member:
    return Member(
        worker=WorkerKey(name, 1),
        rank=0,
        base_clock=base_clock,
        base_sequence=base_sequence,
    )


def record(*members: Member) -> Record:
    return Record(
        fence_number=1, generation=1, kind=FenceKind.MEMBERSHIP, members=members
    )


@pytest.mark.parametrize(
    ("members", "longest"),
    [
        ((member("a", 3), member("b", 1)), "b"),
        ((member("b", 1), member("a", 1)), "a"),
        # A change of the mode set its base anew, at clock 5, for its third push.
        ((member("a", 3), member("b", 5, 3)), "b"),
    ],
)
def test_the_longest_member_comes_first_then_the_lowest_id(
    members: tuple[Member, ...], longest: str
) -> None:
    assert longest_of(members).worker.worker_id == longest
    found = [m.worker for m in members if record(*members).has_longest(m.worker)]
    assert found == [WorkerKey(longest, 1)]


def test_a_record_without_members_has_no_longest() -> None:
    assert record().longest is None
    assert not record().has_longest(WorkerKey("w0", 1))
