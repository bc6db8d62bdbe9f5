import pytest

from pswire.membership import Mode, Outcome
from psworker.optim.push_result import combine
from psworker.transport.values import PushReply


def reply(outcome: Outcome, **fields: object) -> PushReply:
    values: dict[str, object] = {
        "outcome": outcome,
        "shard_incarnation": 1,
        "generation": 1,
        "version": 4,
        "frontier": 2,
        "clock": 2,
    }
    return PushReply(**{**values, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([Outcome.APPLIED, Outcome.APPLIED], "applied"),
        ([Outcome.DUPLICATE, Outcome.APPLIED], "applied"),
        ([Outcome.DUPLICATE, Outcome.DUPLICATE], "duplicate"),
        ([Outcome.DUPLICATE, Outcome.SKIPPED], "skipped"),
        ([Outcome.DUPLICATE, Outcome.DROPPED], "dropped"),
    ],
)
def test_the_outcome_is_what_any_shard_knows_best(
    outcomes: list[Outcome], expected: str
) -> None:
    result = combine([reply(each) for each in outcomes])

    assert result.outcome == expected
    assert result.duplicate == (Outcome.DUPLICATE in outcomes)
    assert result.dropped == (expected == "dropped")
    assert result.skipped == (expected == "skipped")


def test_numbers_are_those_that_hold_on_every_shard() -> None:
    result = combine(
        [
            reply(
                Outcome.SKIPPED, version=4, staleness=0, nonfinite_worker_ids=("w1",)
            ),
            reply(
                Outcome.SKIPPED, version=5, staleness=3, nonfinite_worker_ids=("w0",)
            ),
        ]
    )

    assert (result.version, result.staleness) == (4, 3)
    assert result.nonfinite_worker_ids == ("w0", "w1")


def test_the_mode_is_what_the_newest_answer_says() -> None:
    result = combine(
        [
            reply(Outcome.APPLIED, generation=2, mode=Mode.SSP),
            reply(Outcome.APPLIED, generation=1, mode=Mode.BSP),
        ]
    )

    assert result.mode == "ssp"
    assert not result.rejoined


def test_the_norm_is_what_any_shard_tells() -> None:
    """One that was asked again after it had forgotten tells none."""
    result = combine([reply(Outcome.DUPLICATE), reply(Outcome.APPLIED, grad_norm=0.25)])

    assert result.grad_norm == 0.25
    assert combine([reply(Outcome.SKIPPED)]).grad_norm is None


def test_a_push_has_waited_for_others_as_long_as_where_it_was_longest() -> None:
    waits = [reply(Outcome.APPLIED, peer_wait_s=each) for each in (0.1, 0.3, 0.2)]
    assert combine(waits).peer_wait_s == 0.3
