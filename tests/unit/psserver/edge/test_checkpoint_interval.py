"""How often a checkpoint is made, as users write it."""

import pytest

from psserver.edge.checkpoint_interval import CheckpointInterval


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("500steps", CheckpointInterval(step_count=500)),
        ("1 step", CheckpointInterval(step_count=1)),
        ("90s", CheckpointInterval(duration_ms=90_000)),
        ("10min", CheckpointInterval(duration_ms=600_000)),
        (" 2h ", CheckpointInterval(duration_ms=7_200_000)),
    ],
)
def test_an_interval_is_steps_or_time(text: str, interval: CheckpointInterval) -> None:
    assert CheckpointInterval.parse(text) == interval
    assert CheckpointInterval.parse(str(interval)) == interval


@pytest.mark.parametrize(
    "text",
    ["", "10", "min", "0steps", "0min", "-1s", "1.5h", "10m", "9000h", "5 min s", "٣s"],
)
def test_what_is_no_interval_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(ValueError, match=r"500steps.* 90s, 10min or 2h"):
        CheckpointInterval.parse(text)
