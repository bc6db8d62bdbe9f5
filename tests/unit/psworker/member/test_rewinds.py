"""Returns of the job to a checkpoint: what is set back, when, and what is said."""

import logging
from typing import Final

import pytest

from pswire.checkpoint.registered_state import encode_states
from psworker.member.membership import Membership
from psworker.member.script_state import Rewind, Rewinds, ScriptState
from tests.doubles.core_values import key
from tests.unit.psworker.member.test_script_state import Counter

REWIND: Final = Rewind(
    checkpoint="step-000000000006",
    from_clock=20,
    to_clock=6,
    from_epoch=3,
    to_epoch=1,
)


def made() -> tuple[Rewinds, Counter]:
    state, own = ScriptState(Membership(key("a"))), Counter()
    state.register("own", own)
    return Rewinds(state), own


STORED: Final = encode_states({"own": {"count": 7}})


async def test_all_is_set_back_once_and_when_the_script_goes_on() -> None:
    """Within the step the script would count that step once more."""
    rewinds, own = made()
    seen: list[object] = []

    def follow(rewind: Rewind) -> tuple[str, ...]:
        seen.append(("follower", rewind, own.count))
        return ()

    rewinds.add_follower(follow)
    for name in ("first", "second"):
        rewinds.add_callback(lambda to, name=name: seen.append((name, to, own.count)))  # type: ignore[misc]
    rewinds.end()
    own.count = 100
    rewinds.begin(REWIND, STORED)
    own.count += 1
    assert (own.count, seen) == (101, [])
    rewinds.end()
    rewinds.end()
    assert seen == [
        ("follower", REWIND, 101),
        ("first", REWIND, 7),
        ("second", REWIND, 7),
    ]


async def test_a_second_return_before_the_script_goes_on_is_one_with_the_first() -> (
    None
):
    rewinds, own = made()
    seen: list[Rewind] = []
    rewinds.add_callback(seen.append)
    rewinds.begin(REWIND, b"")
    again = Rewind(
        checkpoint="step-000000000004",
        from_clock=6,
        to_clock=4,
        from_epoch=3,
        to_epoch=0,
    )
    rewinds.begin(again, STORED)
    rewinds.end()
    (rewind,) = seen
    assert (rewind.from_clock, rewind.to_clock, rewind.to_epoch) == (20, 4, 0)
    assert (rewind.checkpoint, own.count) == ("step-000000000004", 7)


async def test_what_a_callback_raises_reaches_the_script_and_is_raised_once() -> None:
    rewinds, own = made()

    def fail(rewind: Rewind) -> None:
        raise KeyError("log")

    rewinds.add_callback(fail)
    rewinds.begin(REWIND, STORED)
    with pytest.raises(KeyError, match="log"):
        rewinds.end()
    assert own.count == 7
    rewinds.end()


@pytest.mark.parametrize("has_callback", [False, True])
async def test_one_line_says_what_is_set_back_and_what_is_not(
    caplog: pytest.LogCaptureFixture, has_callback: bool
) -> None:
    rewinds, _ = made()
    rewinds.add_follower(lambda _: ("residuals of topk",))
    if has_callback:
        rewinds.add_callback(lambda _: None)
    rewinds.begin(REWIND, STORED)
    with caplog.at_level(logging.WARNING):
        rewinds.end()
    (line,) = caplog.messages
    assert line.startswith("the job has returned to checkpoint step-000000000006, and ")
    assert "from clock 20 of epoch 3 to clock 6 of epoch 1" in line
    assert (
        "prepare() and 'own' are as they were there, but for residuals of topk" in line
    )
    assert ("ps.on_rewind() set it back" in line) is not has_callback
