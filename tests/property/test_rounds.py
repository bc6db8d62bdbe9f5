"""The rounds of a worker against one that remembers every step by itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pswire.leased_data import DataRange
from psworker.strategies.rounds import (
    LocalWork,
    Rounds,
    Sent,
    fragment_drawn,
    fragment_in_turn,
)

checked = settings(derandomize=True, deadline=None, max_examples=200)
fragment_counts = st.integers(1, 5)


class DumbRounds:
    """Remembers, of every step, which fragments it has gone with."""

    def __init__(self, fragment_count: int) -> None:
        self.fragment_count = fragment_count
        self.steps: list[tuple[LocalWork, tuple[DataRange, ...], set[int]]] = []
        self.done: list[DataRange] = []

    def missing(self, step_count: int, fragment: int) -> list[int]:
        steps = enumerate(self.steps[:step_count])
        return [place for place, (_, _, sent) in steps if fragment not in sent]

    def work(self, step_count: int, fragment: int) -> LocalWork:
        total = LocalWork()
        for place in self.missing(step_count, fragment):
            total = total.plus(self.steps[place][0])
        return total

    def total(self, step_count: int) -> LocalWork:
        total = LocalWork()
        for work, *_ in self.steps[:step_count]:
            total = total.plus(work)
        return total

    def ranges(self, step_count: int, fragment: int) -> list[DataRange]:
        return [
            each
            for place in self.missing(step_count, fragment)
            for each in self.steps[place][1]
            if len(self.steps[place][2]) == self.fragment_count - 1
        ]

    def count(self, step_count: int, fragment: int) -> None:
        self.done += self.ranges(step_count, fragment)
        for place in self.missing(step_count, fragment):
            self.steps[place][2].add(fragment)


# What happens next: a step of so many samples and tokens, with so many ranges; a push
# of a fragment begins; it counts, or is missed; it is taken.
steps = st.tuples(st.just("step"), st.integers(0, 9), st.integers(0, 9))
pushes = st.tuples(st.just("begin"), st.integers(0, 4), st.just(0))
ends = st.tuples(st.sampled_from(["count", "miss", "take"]), st.just(0), st.just(0))
events = st.lists(st.one_of(steps, steps, pushes, ends), max_size=60)


@checked
@given(fragment_counts, events)
def test_each_step_goes_once_with_each_fragment_and_its_data_with_the_last(
    fragment_count: int, drawn: list[tuple[str, int, int]]
) -> None:
    rounds, dumb = Rounds(fragment_count), DumbRounds(fragment_count)
    begun_after = 0
    named: list[DataRange] = []
    for kind, first, second in drawn:
        sent = rounds.sent
        if kind == "step":
            ranges = tuple(
                DataRange("loader", 0, len(dumb.steps) * 10 + n, n + 1)
                for n in range(first % 3)
            )
            rounds.note_tokens(second)
            rounds.note_step(first, ranges)
            dumb.steps.append((LocalWork(1, first, second), ranges, set()))
        elif kind == "begin" and sent is None:
            before = dumb.total(begun_after)
            fragment, begun_after = first % fragment_count, len(dumb.steps)
            sent = rounds.begin(fragment)
            assert sent.work == dumb.work(begun_after, fragment)
            assert sent.new_work == dumb.total(begun_after).minus(before)
            assert list(sent.ranges) == dumb.ranges(begun_after, fragment)
        elif kind in ("count", "miss") and sent is not None and not rounds.is_settled:
            rounds.settle(has_counted=kind == "count")
            if kind == "count":
                named += sent.ranges
                dumb.count(begun_after, sent.fragment)
            assert rounds.was_missed is (kind == "miss")
            assert rounds.is_settled is (kind == "count")
        elif kind == "take" and sent is not None and rounds.is_settled:
            assert rounds.take() == sent.fragment
        for fragment in range(fragment_count):
            behind = rounds.work_behind(fragment)
            assert behind == dumb.work(len(dumb.steps), fragment)
        unsent = (len(dumb.missing(len(dumb.steps), f)) for f in range(fragment_count))
        assert rounds.unsent_step_count == max(unsent)
        held = {each for _, ranges, _ in dumb.steps for each in ranges} - {*dumb.done}
        assert sorted(rounds.held_ranges) == sorted(held)
        assert named == dumb.done
        # Bounded, however long a worker trains.
        parts = [each.missing for each in rounds._held]
        assert len(parts) <= 2 * fragment_count + 1
    assert rounds.total_step_count == len(dumb.steps)


@checked
@given(fragment_counts, events)
def test_all_is_sent_when_each_fragment_is_pushed_once_more(
    fragment_count: int, drawn: list[tuple[str, int, int]]
) -> None:
    rounds = Rounds(fragment_count)
    ranges = []
    named: list[DataRange] = []

    def push(fragment: int) -> Sent:
        sent = rounds.begin(fragment)
        rounds.settle(has_counted=True)
        rounds.take()
        named.extend(sent.ranges)
        return sent

    for place, (kind, first, _) in enumerate(drawn):
        if kind == "step":
            ranges.append(DataRange("loader", 0, place, place + 1))
            rounds.note_step(first, ranges[-1:])
        elif kind == "begin":
            push(first % fragment_count)
    for fragment in range(fragment_count):
        push(fragment)
    assert rounds.is_clean
    assert sorted(named) == ranges


def test_what_is_taken_has_come_back_after_so_many_steps() -> None:
    rounds = Rounds(2, taken_after=3)
    rounds.note_step(4)
    rounds.begin(1)
    ripe = []
    for _ in range(4):
        ripe.append(rounds.is_ripe)
        rounds.note_step(4)
    assert ripe == [False, False, False, True]
    assert not rounds.is_settled
    rounds.settle(has_counted=True)
    assert rounds.take() == 1
    # What was computed meanwhile goes with the next push of that fragment.
    assert rounds.work_behind(1) == LocalWork(4, 16)
    assert rounds.work_behind(0) == LocalWork(5, 20)


def test_a_worker_that_has_joined_anew_has_nothing_behind_it() -> None:
    rounds = Rounds(2)
    rounds.note_step(4, [DataRange("loader", 0, 0, 4)])
    rounds.begin(0)
    rounds.start_over()
    assert rounds.is_clean
    assert rounds.sent is None
    rounds.note_step(4)
    assert rounds.begin(1).ranges == ()


def test_two_pushes_at_a_time_are_a_mistake_of_the_caller() -> None:
    rounds = Rounds()
    rounds.begin(0)
    with pytest.raises(AssertionError, match="one push is under way"):
        rounds.begin(0)


@checked
@given(fragment_counts, st.integers(0, 50))
def test_each_cycle_of_clocks_has_each_fragment_once(
    fragment_count: int, cycle: int
) -> None:
    clocks = range(cycle * fragment_count + 1, (cycle + 1) * fragment_count + 1)
    for of in (fragment_in_turn, fragment_drawn):
        found = [of(clock, fragment_count) for clock in clocks]
        assert sorted(found) == list(range(fragment_count))


@pytest.mark.parametrize("fragment_count", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("pace", [2, 3, 4, 5])
def test_a_worker_that_misses_clocks_meets_all_fragments(
    fragment_count: int, pace: int
) -> None:
    """Each second clock of four would be two fragments for ever, in turn."""
    clocks = range(1, 400 * fragment_count, pace)
    met = [fragment_drawn(clock, fragment_count) for clock in clocks]
    fair = len(met) / fragment_count
    assert min(met.count(each) for each in range(fragment_count)) > fair / 3
