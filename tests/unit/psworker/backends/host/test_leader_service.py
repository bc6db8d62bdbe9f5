"""How a leader deals batches: in rounds, each to one, those of the lost again."""

import random

from pswire.leased_data import DataRange
from psworker.backends.host.leader_service import Deal
from psworker.backends.host.messages import ProcessId

A, B, C = (ProcessId(number, 1) for number in range(3))


def ranges(start: int, stop: int) -> list[DataRange]:
    return [DataRange("loader", 0, at, at + 1) for at in range(start, stop)]


def starts(given: tuple[DataRange, ...]) -> list[int]:
    return [each.start for each in given]


def test_batches_go_round_whoever_asks_first() -> None:
    deal = Deal()
    deal.take_in(ranges(0, 7), (A, B, C))
    assert starts(deal.hand_out(C, 9)) == [2, 5]
    assert starts(deal.hand_out(A, 1)) == [0]
    assert starts(deal.hand_out(B, 9)) == [1, 4]
    assert starts(deal.hand_out(A, 9)) == [3, 6]
    deal.take_in(ranges(0, 8), (A, B, C))  # all that the group holds, and one more
    assert starts(deal.hand_out(A, 9)) == []
    assert starts(deal.hand_out(B, 9)) == [7]


def test_what_a_lost_process_had_goes_to_the_others_unless_it_was_used() -> None:
    deal = Deal()
    deal.take_in(ranges(0, 6), (A, B))
    assert starts(deal.hand_out(B, 2)) == [1, 3]
    deal.note_used(ranges(1, 2))
    deal.lose({B}, (A,))
    assert starts(deal.hand_out(A, 9)) == [0, 2, 4, 3, 5]
    assert not deal.is_idle
    deal.note_used(ranges(0, 6))
    assert deal.is_idle


def test_a_new_leader_deals_what_nobody_living_has() -> None:
    deal = Deal({A: ranges(0, 2), B: ranges(2, 3)})
    deal.note_used(ranges(3, 4))  # of a step that is sealed
    deal.take_in(ranges(0, 6), (A, B))
    assert starts(deal.hand_out(A, 9)) == [4]
    assert starts(deal.hand_out(B, 9)) == [5]


def test_enough_is_asked_for_that_all_can_have_as_much() -> None:
    deal = Deal()
    assert deal.wanted(A, 4, (A, B)) == 8
    deal.take_in(ranges(0, 3), (A, B))
    assert deal.wanted(A, 2, (A, B)) == 0
    assert deal.wanted(B, 2, (A, B)) == 1
    assert starts(deal.hand_out(A, 1)) == [0]


def test_drawn_schedules_use_each_batch_once() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        members = [A, B, C]
        deal, held, used = Deal(), {process: [] for process in members}, []  # type: ignore[var-annotated]
        cursor = 0
        while len(used) < 30:
            process = draw.choice(members)
            match draw.randrange(4):
                case 0:
                    cursor = min(30, cursor + deal.wanted(process, 2, members))
                    group = [e for e in ranges(0, cursor) if e not in used]
                    deal.take_in(group, members)
                case 1:
                    held[process] += deal.hand_out(process, draw.randint(1, 3))
                case 2 if held[process]:
                    used.append(held[process].pop(0))
                    deal.note_used(used[-1:])
                case 3 if len(members) > 1 and draw.random() < 0.05:
                    members.remove(process)
                    deal.lose({process}, members)
        assert sorted(used) == ranges(0, 30), f"seed {seed}"
