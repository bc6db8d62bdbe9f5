"""Who is who: ids, incarnations, and whether a process is still there."""

import pytest

from psserver.coordinator.core.roster import (
    ENDED_COUNT_MAX,
    IDS_KEPT_MAX,
    Roster,
    WorkerEntry,
)
from pswire.limits import NAME_BYTES_MAX
from pswire.membership import WorkerKey, WorkerState
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import key
from tests.refusals import refused


def register(roster: Roster, name: str, process_id: str) -> WorkerEntry:
    return roster.register(
        process_id=process_id, worker_id=name, address="host:1", now_ms=0
    )


def test_a_process_that_asks_again_gets_the_same_identity() -> None:
    roster = Roster()
    assert register(roster, "a", "p") is register(roster, "a", "p")


def test_an_id_belongs_to_one_process_at_a_time() -> None:
    roster = Roster()
    register(roster, "a", "p")
    with refused(ErrorReason.WORKER_ID_TAKEN, "host:1 that is registered"):
        register(roster, "a", "q")
    assert roster.incarnations == {"a": 1}


def test_each_start_gets_a_higher_incarnation() -> None:
    roster = Roster({"a": 4})
    first = register(roster, "a", "p")
    first.state = WorkerState.LEFT
    second = register(roster, "a", "q")

    assert [first.worker, second.worker] == [key("a/5"), key("a/6")]
    assert roster.processes == {key("a/6"): "q"}


def test_ids_are_chosen_for_those_that_have_none() -> None:
    roster = Roster()
    register(roster, "w1", "p")
    names = [register(roster, "", f"q{i}").worker.worker_id for i in range(3)]
    assert names == ["w0", "w2", "w3"]


@pytest.mark.parametrize(
    ("name", "process_id", "reason"),
    [
        ("a" * (NAME_BYTES_MAX + 1), "p", ErrorReason.LIMIT_EXCEEDED),
        ("a", "", ErrorReason.MALFORMED_MESSAGE),
        ("a", "p" * (NAME_BYTES_MAX + 1), ErrorReason.MALFORMED_MESSAGE),
    ],
)
def test_names_have_limits(name: str, process_id: str, reason: ErrorReason) -> None:
    roster = Roster()
    with refused(reason):
        register(roster, name, process_id)
    assert roster.incarnations == {}


def test_an_id_that_would_garble_logs_is_given_to_nobody() -> None:
    roster = Roster()
    with refused(ErrorReason.MALFORMED_MESSAGE, "contains the control character"):
        register(roster, "a\nb", "p")
    assert roster.incarnations == {}


def test_unknown_and_closed_identities_are_told_apart() -> None:
    roster = Roster({"a": 2})
    for worker, reason in (
        (key("z"), ErrorReason.WORKER_UNKNOWN),
        (key("a/2"), ErrorReason.WORKER_INCARNATION_STALE),
    ):
        with refused(reason):
            roster.entry(worker)


def test_a_member_that_does_not_come_back_after_a_restart_is_lost() -> None:
    roster = Roster({"a": 1})
    roster.restore(key("a"), "p", absent_from_ms=10_000)

    def lost_at(now_ms: int) -> list[WorkerEntry]:
        return roster.lost(now_ms, grace_ms=500, lease_ttl_ms=10_000)

    with pytest.raises(Refusal, match="belongs to a process that is suspect"):
        register(roster, "a", "q")
    assert register(roster, "a", "p").worker == key("a")
    assert lost_at(10_499) == []
    assert [entry.worker for entry in lost_at(10_500)] == [key("a")]


def test_one_that_leaves_is_not_lost() -> None:
    roster = Roster()
    entry = register(roster, "a", "p")
    entry.state = WorkerState.LEAVING
    entry.broken_ms = 0
    assert roster.lost(1_000_000, grace_ms=500, lease_ttl_ms=10_000) == []


def test_ids_that_nobody_has_are_forgotten_and_their_numbers_are_not() -> None:
    """Whoever reaches the port can make up any number of ids."""
    roster = Roster({"first": 7})
    for number in range(IDS_KEPT_MAX):
        entry = begin(roster, f"made up {number}")
        entry.end(WorkerState.LEFT, 0)
        roster.forget_ended(1 << 40, lease_ttl_ms=1)

    kept = roster.incarnations
    assert len(kept) <= IDS_KEPT_MAX + 1
    assert "first" not in kept
    again = Roster(kept)
    for each in (roster, again):
        assert begin(each, "first").worker.incarnation > 7
        with refused(ErrorReason.WORKER_INCARNATION_STALE, "closed"):
            each.entry(WorkerKey("first", 7))


def test_ids_that_somebody_has_are_kept() -> None:
    roster = Roster()
    member = begin(roster, "member")
    member.is_watching = True
    for number in range(IDS_KEPT_MAX):
        entry = begin(roster, f"made up {number}")
        entry.end(WorkerState.LEFT, 0)
        roster.forget_ended(1 << 40, lease_ttl_ms=1)
    assert roster.incarnations["member"] == 1
    assert roster.entry(member.worker) is member


def test_so_many_register_and_do_no_more() -> None:
    roster = Roster()
    for number in range(3):
        begin(roster, str(number), registered_max=3)
    with refused(ErrorReason.BUSY, "registrations"):
        begin(roster, "one more", registered_max=3)
    assert begin(roster, "0", registered_max=3).worker == WorkerKey("0", 1)
    roster.entry(WorkerKey("1", 1)).is_watching = True
    begin(roster, "one more", registered_max=3)


def test_so_many_starts_that_are_over_are_remembered() -> None:
    roster = Roster()
    for number in range(ENDED_COUNT_MAX + 10):
        begin(roster, f"w{number}").end(WorkerState.EVICTED, number)
    roster.forget_ended(0, lease_ttl_ms=10_000)
    left = roster.in_state(WorkerState.EVICTED)
    assert len(left) == ENDED_COUNT_MAX
    assert min(entry.ended_ms for entry in left) == 10


def begin(roster: Roster, worker_id: str, registered_max: int = 1 << 30) -> WorkerEntry:
    """A process of its own registers under an id."""
    return roster.register(
        process_id=f"process of {worker_id}",
        worker_id=worker_id,
        address="h:1",
        now_ms=0,
        registered_max=registered_max,
    )
