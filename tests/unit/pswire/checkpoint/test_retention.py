"""What stays of a job's checkpoints."""

from pswire.checkpoint.manifest import CheckpointName
from pswire.checkpoint.retention import Held, superfluous


def held(*versions: int, is_whole: bool = True, is_finite: bool = True) -> list[Held]:
    return [
        Held(CheckpointName(version), is_whole, is_finite=is_finite)
        for version in versions
    ]


def going(found: list[Held], verified: int, keep: int) -> list[int]:
    return [name.version for name in superfluous(found, CheckpointName(verified), keep)]


def test_the_newest_stay() -> None:
    assert going(held(5, 1, 3, 2, 4), 5, 3) == [1, 2]
    assert going(held(1, 2, 3), 3, 3) == []


def test_at_least_one_stays() -> None:
    assert going(held(1, 2), 2, 0) == [1]


def test_nothing_goes_that_is_newer_than_what_was_verified() -> None:
    assert going(held(1, 2, 3, 4, 5), 3, 2) == [1]


def test_what_is_not_whole_counts_for_nothing_and_goes_when_it_is_older() -> None:
    found = held(1, 2, 4) + held(3, 5, is_whole=False)

    assert going(found, 4, 3) == [3]


def test_what_was_verified_stays_though_it_is_damaged_since() -> None:
    assert going(held(1, 2) + held(3, is_whole=False), 3, 2) == [1]


def test_a_diverged_run_pushes_out_no_finite_values() -> None:
    found = held(1, 2) + held(3, 4, is_finite=False)

    assert going(found, 2, 2) == []
    assert going(found + held(7), 7, 2) == [1]


def test_a_diverged_run_does_not_fill_the_disk() -> None:
    found = held(1) + held(2, 3, 4, 5, is_finite=False)

    assert going(found, 1, 2) == [2, 3]
