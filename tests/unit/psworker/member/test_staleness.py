import pytest

from pswire.membership import FenceKind, Mode, Outcome, Record
from psworker.errors import StalenessError
from psworker.member.core import check_bound
from psworker.transport.values import PushReply


def reply(
    mode: Mode, *, clock: int, frontier: int, bound: int = 0, generation: int = 4
) -> PushReply:
    return PushReply(
        outcome=Outcome.APPLIED,
        shard_incarnation=1,
        generation=generation,
        version=0,
        frontier=frontier,
        clock=clock,
        mode=mode,
        staleness_bound=bound,
    )


def record(mode: Mode, bound: int = 0, mode_clock: int = 0) -> Record:
    return Record(
        fence_number=9,
        generation=4,
        kind=FenceKind.MODE,
        members=(),
        mode=mode,
        staleness_bound=bound,
        mode_clock=mode_clock,
    )


@pytest.mark.parametrize(
    ("answer", "rule"),
    [
        (reply(Mode.BSP, clock=7, frontier=7), record(Mode.BSP)),
        (reply(Mode.BSP, clock=7, frontier=8), record(Mode.BSP)),
        (reply(Mode.SSP, clock=7, frontier=4, bound=3), record(Mode.SSP, 3)),
        (reply(Mode.ASP, clock=70, frontier=0), record(Mode.ASP)),
        # Of another generation, which this worker has not heard of yet.
        (reply(Mode.ASP, clock=7, frontier=0, generation=5), record(Mode.BSP)),
        # Of a clock before the change.
        (reply(Mode.BSP, clock=7, frontier=7), record(Mode.ASP, mode_clock=7)),
    ],
)
def test_what_the_mode_allows_passes(answer: PushReply, rule: Record) -> None:
    check_bound(0, answer, rule)
    check_bound(0, answer, None)


@pytest.mark.parametrize(
    ("answer", "rule", "text"),
    [
        (
            reply(Mode.BSP, clock=7, frontier=6),
            record(Mode.BSP),
            "shard 2 gave values for clock 7 at frontier 6, and in bsp the frontier "
            "must be at least 7",
        ),
        (
            reply(Mode.SSP, clock=7, frontier=3, bound=3),
            record(Mode.SSP, 3),
            "in ssp with staleness bound 3 the frontier must be at least 4",
        ),
        (
            reply(Mode.ASP, clock=7, frontier=3),
            record(Mode.SSP, 3),
            "in asp, but generation 4 trains in ssp with staleness bound 3",
        ),
        (
            reply(Mode.SSP, clock=7, frontier=3, bound=9),
            record(Mode.SSP, 3, mode_clock=6),
            "in ssp with staleness bound 9, but generation 4 trains in ssp",
        ),
    ],
)
def test_what_it_does_not_allow_is_an_error_that_says_all(
    answer: PushReply, rule: Record, text: str
) -> None:
    with pytest.raises(StalenessError) as caught:
        check_bound(2, answer, rule)

    assert text in str(caught.value)
    assert "please report it" in str(caught.value)
    assert caught.value.facts["frontier"] == str(answer.frontier)


def test_an_answer_that_was_dropped_carries_no_values() -> None:
    dropped = PushReply(
        outcome=Outcome.DROPPED,
        shard_incarnation=1,
        generation=4,
        version=0,
        frontier=3,
        clock=9,
    )

    check_bound(0, dropped, record(Mode.BSP))
