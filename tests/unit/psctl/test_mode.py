"""What `psctl mode` says of a change."""

import pytest

from psctl.mode import ChangedMode
from pswire.addresses import Address
from pswire.membership import Mode, ModeTerms


@pytest.mark.parametrize(
    ("previous", "terms", "text"),
    [
        (Mode.BSP, ModeTerms(Mode.ASP), "asp, after clock 74 (generation 2)"),
        (Mode.ASP, ModeTerms(Mode.BSP), "bsp, after clock 74 (generation 2)"),
        (
            Mode.BSP,
            ModeTerms(Mode.QUORUM, quorum=2),
            "quorum of 2, after clock 74 (generation 2)",
        ),
    ],
)
def test_the_clock_of_the_change_is_named(
    previous: Mode, terms: ModeTerms, text: str
) -> None:
    changed = ChangedMode(
        coordinator=Address("127.0.0.1", 7070),
        terms=terms,
        previous_mode=previous,
        generation=2,
        mode_clock=74,
    )
    assert changed.text == text
