"""What a run has to show, from the steps of its workers and its snapshots. Pure."""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from psctl.compare.attacks import Attack
from psctl.compare.loads import Load
from psctl.compare.modes import ComparedMode
from pswire.aggregation import MEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConditions:
    """Under which a run was made.

    Attributes:
        gradient_count: Gradients in updates after which it ends.
        base_s: Time of an undisturbed step.
        seed: Of data and delays.
        rate_share: Of the learning rate that the mode would have.
        aggregation: What the gradients of a clock become.
        attack: What the first workers do instead of training, if they do.
    """

    mode: ComparedMode
    load: Load
    worker_count: int
    batch_size: int
    gradient_count: int
    base_s: float
    seed: int
    rate_share: float = 1.0
    aggregation: str = str(MEAN)
    attack: Attack | None = None

    @property
    def coordinator_options(self) -> list[str]:
        """Options of `psserver coordinator` besides `--mode`."""
        return [*self.mode.coordinator_options(), "--aggregation", self.aggregation]

    @property
    def gradients_per_update(self) -> int:
        return self.mode.gradients_per_update(self.worker_count)

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> Self:
        values = json.loads(text)
        mode, load = ComparedMode(**values.pop("mode")), Load(values.pop("load"))
        attack = values.pop("attack")
        return cls(mode=mode, load=load, attack=attack and Attack(*attack), **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that has ended. Times are on the machine's monotonic clock.

    Attributes:
        began_s: When its values were there.
        computed_s: When its gradient was; what the step's own work took.
        pushed_s: When `optimizer.step()` was called, after the wait.
        ended_s: When that call returned.
        clock: Clock of the worker after it.
        is_dropped: Whether its gradient is in no update.
        staleness: Updates between the values of its gradient and its own.
    """

    worker_index: int
    began_s: float
    computed_s: float
    pushed_s: float
    ended_s: float
    clock: int
    is_dropped: bool
    staleness: int

    def to_line(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Held-out accuracy at a moment, in seconds since the first step of a run began."""

    at_s: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run, up to the end of the last step that was asked for.

    Attributes:
        duration_s: From the beginning of the first step.
        steps_per_s: Steps of all workers, with those whose gradient was dropped.
        samples_per_s: Samples in updates.
        sample_count: Samples in updates.
        dropped_sample_count: Samples whose gradient is in no update.
        step_cost: What a step took, in undisturbed steps, with its waiting for others.
        call_ms: What `optimizer.step()` took, the median.
        own_work_ms: What the step's own computation took, the median.
        target_s: When the stated accuracy was first seen, `None` for never.
        staleness_counts: Gradients in updates by their staleness.
    """

    conditions: RunConditions
    duration_s: float
    steps_per_s: float
    samples_per_s: float
    sample_count: int
    dropped_sample_count: int
    step_cost: float
    call_ms: float
    own_work_ms: float
    target_s: float | None
    final_accuracy: float
    staleness_counts: Mapping[int, int]
    curve: tuple[CurvePoint, ...]

    @property
    def staleness_mean(self) -> float:
        total = sum(self.staleness_counts.values())
        return sum(s * n for s, n in self.staleness_counts.items()) / total

    @property
    def staleness_max(self) -> int:
        return max(self.staleness_counts)


def first_began_s(steps: Sequence[Step]) -> float:
    return min(step.began_s for step in steps)


def figures_of(
    conditions: RunConditions,
    steps: Sequence[Step],
    curve: Sequence[CurvePoint],
    *,
    target_accuracy: float,
) -> Figures:
    """Counts a run, from steps in any order and a curve whose last point is the end.

    Steps after the last one that was asked for don't count.
    """
    counted = _counted(steps, conditions.gradient_count)
    useful = [step for step in counted if not step.is_dropped]
    duration_s = counted[-1].ended_s - first_began_s(counted)
    sample_count = len(useful) * conditions.batch_size
    return Figures(
        conditions=conditions,
        duration_s=duration_s,
        steps_per_s=len(counted) / duration_s,
        samples_per_s=sample_count / duration_s,
        sample_count=sample_count,
        dropped_sample_count=(len(counted) - len(useful)) * conditions.batch_size,
        step_cost=statistics.mean(step.ended_s - step.began_s for step in counted)
        / conditions.base_s,
        call_ms=1000
        * statistics.median(step.ended_s - step.pushed_s for step in counted),
        own_work_ms=1000
        * statistics.median(step.computed_s - step.began_s for step in counted),
        target_s=next(
            (point.at_s for point in curve if point.accuracy >= target_accuracy), None
        ),
        final_accuracy=curve[-1].accuracy,
        staleness_counts=dict(sorted(Counter(s.staleness for s in useful).items())),
        curve=tuple(curve),
    )


def _counted(steps: Sequence[Step], gradient_count: int) -> list[Step]:
    """Steps up to the one with which enough gradients are in updates."""
    counted = []
    useful_count = 0
    for step in sorted(steps, key=lambda step: step.ended_s):
        counted.append(step)
        useful_count += not step.is_dropped
        if useful_count >= gradient_count:
            break
    return counted
