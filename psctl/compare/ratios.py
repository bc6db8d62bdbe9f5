"""Each mode beside BSP, and beside what arithmetic lets it reach. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from psctl.compare.arithmetic import ideal_duration, rate_limit
from psctl.compare.figures import Figures, RunConditions

SHARE_MIN: Final = 0.8
SHARE_MAX: Final = 1.1
"""Of what arithmetic expects, that a measured ratio must have at least and at most.
Below: messages take their time, which is the same in all modes. Above: BSP has more of
it in a step, as all its workers push at once."""

ACCURACY_DIFFERENCE_MAX: Final = 0.01

LEARNED_ACCURACY_MIN: Final = 0.5
"""Of BSP. Below it training has hardly left chance, and a point is a matter of luck."""
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A run against that of BSP under the same load.

    Attributes:
        measured: Its samples in updates a second, over BSP's.
        expected: The same if nothing but the drawn delays took time.
        limit: The most that it could be in a run without end.
        accuracy_difference: Its final accuracy less BSP's.
    """

    conditions: RunConditions
    measured: float
    expected: float
    limit: float
    accuracy_difference: float
    bsp_accuracy: float

    @property
    def verdict(self) -> str:
        wrong = []
        if self.measured < SHARE_MIN * self.expected:
            wrong.append(f"slower than {SHARE_MIN:g} of it")
        if self.measured > SHARE_MAX * self.expected:
            wrong.append(f"faster than {SHARE_MAX:g} of it")
        if self.bsp_accuracy < LEARNED_ACCURACY_MIN:
            wrong.append("too few samples to compare accuracies")
        elif abs(self.accuracy_difference) > ACCURACY_DIFFERENCE_MAX + _ROUNDING:
            wrong.append("accuracy over a point off")
        return ", ".join(wrong) or "as expected"


def ratios_to_bsp(figures: Sequence[Figures]) -> list[Ratio]:
    """Of all runs but BSP's own, where there is one of BSP under their load."""
    reference = {
        each.conditions.load: each
        for each in figures
        if each.conditions.mode.name == "bsp"
    }
    return [
        _ratio(each, reference[each.conditions.load])
        for each in figures
        if each.conditions.load in reference and each.conditions.mode.name != "bsp"
    ]


def ideal_s(conditions: RunConditions) -> float:
    """Duration of a run if nothing but the drawn delays took time."""
    return conditions.base_s * ideal_duration(
        conditions.mode,
        conditions.load,
        worker_count=conditions.worker_count,
        gradient_count=conditions.gradient_count,
        seed=conditions.seed,
    )


def _ratio(figures: Figures, bsp: Figures) -> Ratio:
    own, other = figures.conditions, bsp.conditions
    return Ratio(
        conditions=own,
        measured=figures.samples_per_s / bsp.samples_per_s,
        expected=ideal_s(other) / ideal_s(own),
        limit=rate_limit(own.mode, own.load, own.worker_count)
        / rate_limit(other.mode, other.load, other.worker_count),
        accuracy_difference=figures.final_accuracy - bsp.final_accuracy,
        bsp_accuracy=bsp.final_accuracy,
    )
