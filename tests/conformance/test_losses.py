import pytest

from tests.conformance.losses import Line, difference, in_turn, over_workers, together


def lines(*pairs: tuple[float, int]) -> list[Line]:
    return [Line((loss,), count) for loss, count in pairs]


def test_a_line_is_losses_and_a_count() -> None:
    assert Line.parse("0.5 1e-3 32") == Line((0.5, 0.001), 32)


def test_losses_over_several_workers_are_weighted_by_their_samples() -> None:
    assert together(lines((1.0, 3), (5.0, 1))) == Line((2.0,), 4)


def test_a_worker_without_a_part_of_the_last_batch_has_no_line_for_it() -> None:
    alone = lines((2.0, 8), (7.0, 4), (2.0, 8))
    workers = [lines((1.0, 4), (7.0, 4), (1.5, 4)), lines((3.0, 4), (2.5, 4))]

    assert over_workers(alone, workers, 4) == alone


def test_steps_that_one_process_did_not_take_are_an_error() -> None:
    workers = [lines((1.0, 4)), lines((1.0, 4), (1.0, 4))]

    with pytest.raises(AssertionError, match="more steps"):
        over_workers(lines((1.0, 8)), workers, 4)


def test_samples_that_no_worker_had_are_an_error() -> None:
    merged = over_workers(lines((1.0, 8)), [lines((1.0, 4)), []], 4)

    with pytest.raises(AssertionError):
        difference(lines((1.0, 8)), merged)


def test_batches_in_turn_are_those_of_the_workers_one_by_one() -> None:
    workers = [lines((1.0, 4), (3.0, 4)), lines((2.0, 4), (4.0, 4))]

    assert in_turn(workers) == lines((1.0, 4), (2.0, 4), (3.0, 4), (4.0, 4))


def test_the_difference_is_the_largest_of_all_steps_and_columns() -> None:
    alone = [Line((1.0, 10.0), 4), Line((3.0, 10.0), 4)]
    other = [Line((1.0, 10.1), 4), Line((3.6, 10.0), 4)]

    assert difference(alone, other) == pytest.approx(0.2)


def test_a_small_loss_is_measured_by_the_mean() -> None:
    assert difference(lines((1.0, 4), (0.0, 4)), lines((1.0, 4), (0.1, 4))) == (
        pytest.approx(0.2)
    )
