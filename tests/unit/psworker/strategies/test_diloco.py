"""What DiLoCo in fragments takes, and what it refuses."""

import pytest

import psworker


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fragment_count": 0}, "fragment_count=0 does not go with every=8"),
        ({"fragment_count": 9}, "at most as many as there are steps"),
        ({"fragment_count": 1.5}, "fragment_count=1.5 does not go with"),
        ({"taken_after": -1}, "taken_after=-1 does not go with every=8"),
        ({"taken_after": 5}, "one push is under way at a time"),
        ({"taken_after": 1.5}, "taken_after=1.5 does not go with"),
        ({"own_share": 1.0}, "own_share=1.0 is no share"),
        ({"own_share": -0.1}, "to less than 1"),
        ({"own_share": "half"}, "own_share='half' is no share"),
    ],
)
@pytest.mark.parametrize(
    "strategy", [psworker.StreamingDiLoCo, psworker.DecoupledDiLoCo]
)
def test_numbers_that_do_not_go_together_are_refused(
    strategy: type[psworker.StreamingDiLoCo], given: dict[str, float | str], words: str
) -> None:
    fits: dict[str, float] = {"fragment_count": 2, "taken_after": 4}
    strategy(8, **fits)  # type: ignore[arg-type]
    with pytest.raises(psworker.ConfigurationError, match=words):
        strategy(8, **{**fits, **given})  # type: ignore[arg-type]


def test_only_a_worker_that_waits_for_nobody_must_take_later() -> None:
    assert psworker.StreamingDiLoCo(taken_after=0).taken_after == 0
    with pytest.raises(psworker.ConfigurationError, match="from 1 to every"):
        psworker.DecoupledDiLoCo(taken_after=0)
