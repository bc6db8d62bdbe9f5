"""Runs hold what a plain set of positions holds, and never more runs than needed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from psserver.coordinator.core.data.position_set import PositionSet

RUNS = st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda p: (p[0], sum(p)))


@settings(derandomize=True, max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.booleans(), RUNS), max_size=30))
def test_it_holds_what_a_plain_set_holds(changes: list[tuple[bool, tuple]]) -> None:  # type: ignore[type-arg]
    found, plain = PositionSet(), set[int]()
    for is_added, (start, stop) in changes:
        piece = set(range(start, stop))
        assert found.covers(start, stop) == (bool(piece) and piece <= plain)
        if is_added:
            found.add(start, stop)
            plain |= piece
        elif found.covers(start, stop):
            found.remove(start, stop)
            plain -= piece
        assert {p for run in found.runs for p in range(*run)} == plain
        assert found.position_count == len(plain)
        assert found.run_count == len(found.runs)
        assert found.run_count == sum(p - 1 not in plain for p in plain)
        assert found == PositionSet(found.runs)
        assert bool(found) == bool(plain)


def test_the_lowest_run_leaves_first() -> None:
    kept = PositionSet([(8, 9), (0, 2), (2, 4)])
    assert kept.pop_first() == (0, 4)
    assert kept.runs == [(8, 9)]
    assert kept != PositionSet([(8, 10)])
    assert repr(kept) == "PositionSet([(8, 9)])"
