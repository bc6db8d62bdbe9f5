"""What a run of `psctl compare --strategies` has to show. Pure."""

import bisect
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Self

from psctl.compare.loads import Load
from psctl.compare.modes import ComparedMode
from psctl.compare.strategies import Contender


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Between each worker and its shard, in each direction.

    Attributes:
        mbit: Megabits a second.
        latency_ms: One way.
    """

    mbit: float
    latency_ms: float = 0.0

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.mbit:g} Mbit/s and {self.latency_ms:g} ms each way"


_LINK: Final = re.compile(
    r"(?P<mbit>\d+(?:\.\d+)?)(?P<giga>[gm])bit(?:,\s*(?P<ms>\d+(?:\.\d+)?)ms)?", re.I
)


def parse_link(text: str) -> LinkSpeed:
    """Reads such as `50mbit,20ms`.

    Raises:
        ValueError: It is no speed.
    """
    found = _LINK.fullmatch(text.strip())
    if found is None or not float(found["mbit"]):
        raise ValueError(
            f"{text!r} is no link: give a speed and, if it has one, a latency of one "
            "way, such as 50mbit,20ms or 1gbit"
        )
    factor = 1000 if found["giga"].lower() == "g" else 1
    return LinkSpeed(factor * float(found["mbit"]), float(found["ms"] or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRun:
    """Under which a run is made.

    Attributes:
        batch_size: Samples of a worker's step.
        sample_count: Samples of all workers together.
        base_s: Least time of an undisturbed step.
        seed: Of data and delays.
    """

    contender: Contender
    load: Load
    worker_count: int
    batch_size: int
    sample_count: int
    base_s: float
    seed: int

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> Self:
        values = json.loads(text)
        contender = values.pop("contender")
        mode = ComparedMode(**contender.pop("mode"))
        return cls(
            contender=Contender(mode=mode, **contender),
            load=Load(values.pop("load")),
            **values,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where a worker is, at a time of the machine's monotonic clock.

    Attributes:
        step_count: Steps of its own.
        sample_count: Samples of these.
        sent_bytes: To shards.
        received_bytes: From shards.
        clock: Clock of the worker.
    """

    worker_index: int
    at_s: float
    step_count: int
    sample_count: int
    sent_bytes: int
    received_bytes: int
    clock: int

    def to_line(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class LossPoint:
    """Held-out loss at a moment of a run.

    Attributes:
        at_s: Since its first step began.
        sample_count: Samples that all workers had trained.
        byte_count: Bytes that all workers had sent and received.
        loss: In nats a character.
    """

    at_s: float
    sample_count: int
    byte_count: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFigures:
    """Of one run, from the first step to the end of the last worker.

    Attributes:
        sent_bytes: By all workers, to shards.
        received_bytes: By all workers, from shards.
        exchange_count: Pushes of a worker that counted, the most of all.
        curve: Its last point is the end.
    """

    run: StrategyRun
    duration_s: float
    sample_count: int
    sent_bytes: int
    received_bytes: int
    exchange_count: int
    curve: tuple[LossPoint, ...]

    @property
    def samples_per_s(self) -> float:
        return self.sample_count / self.duration_s

    @property
    def byte_count(self) -> int:
        return self.sent_bytes + self.received_bytes

    @property
    def final_loss(self) -> float:
        return self.curve[-1].loss

    def first_at_s(self, loss: float) -> float | None:
        """When the held-out loss was first so low; None for never."""
        return next((each.at_s for each in self.curve if each.loss <= loss), None)


class Progression:
    """What all workers of a run had done at any moment."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.began_s = min(each.at_s for each in points)
        self.ended_s = max(each.at_s for each in points)
        self._of_workers: dict[int, list[Point]] = {}
        for each in sorted(points, key=lambda point: point.at_s):
            self._of_workers.setdefault(each.worker_index, []).append(each)

    def at(self, at_s: float) -> list[Point]:
        """Of each worker, the newest point at a moment, or its first."""
        return [
            points[max(0, bisect.bisect_right(points, at_s, key=_at_s) - 1)]
            for points in self._of_workers.values()
        ]


def figures_of(
    run: StrategyRun, points: Sequence[Point], losses: Sequence[tuple[float, float]]
) -> StrategyFigures:
    """Counts a run.

    Args:
        run: Its conditions.
        points: Where its workers were, in any order.
        losses: Times and held-out losses, in order; the last is that of the end.
    """
    progression = Progression(points)
    *earlier, (_, final) = losses
    began_s, ended_s = progression.began_s, progression.ended_s
    timed = [each for each in earlier if began_s < each[0] < ended_s]
    curve = []
    for at_s, loss in [*timed, (ended_s, final)]:
        now = progression.at(at_s)
        curve.append(
            LossPoint(
                at_s=at_s - began_s,
                sample_count=sum(each.sample_count for each in now),
                byte_count=sum(each.sent_bytes + each.received_bytes for each in now),
                loss=loss,
            )
        )
    last = progression.at(ended_s)
    return StrategyFigures(
        run=run,
        duration_s=ended_s - began_s,
        sample_count=sum(each.sample_count for each in last),
        sent_bytes=sum(each.sent_bytes for each in last),
        received_bytes=sum(each.received_bytes for each in last),
        exchange_count=max(each.clock for each in last),
        curve=tuple(curve),
    )


def _at_s(point: Point) -> float:
    return point.at_s
