"""How many steps a worker trains between two exchanges: the H of the papers.

Pure. `every=` of a strategy takes a number, `Growing` or `ShareOfTime`.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

from typing_extensions import override

from pswire.number_range import NumberRange
from psworker.errors import refuse_numbers
from psworker.strategies.rounds import Progress

STEP_COUNT_MAX: Final = 1_000_000
"""Of a round. More is a mistake: a job would hardly ever hear of the worker."""

STEPS: Final = NumberRange(1, STEP_COUNT_MAX, unit="local steps")

FIRST_DEFAULT: Final = 10
MOST_DEFAULT: Final = 1000
"""DiLoCo (arXiv 2311.08105, table 3) still trains well with 1,000 steps a round."""

_HEADROOM: Final = 1.1
"""What is chosen over what was measured, so that noise alone asks for no other H."""
_KEPT: Final = 1.25
"""Times the measured H up to which a longer one stays."""
_GROWTH_MAX: Final = 4
"""Times that H grows or shrinks at once: one odd measurement must not end a job's
exchanges for hours."""
_GROWTH: Final = NumberRange(0.0, 1e6, unit="local steps", is_above=True)
_SHARE: Final = NumberRange(0.0, 1.0, is_above=True, is_below=True)
_STEP_WINDOW: Final = 64
_PUSH_WINDOW: Final = 5
"""Steps and pushes whose times count."""


@runtime_checkable
class Pace(Protocol):
    """Chooses the steps of a round."""

    def step_count(
        self, before: int | None, progress: Progress, fragment_count: int = 1
    ) -> int:
        """Steps of the round that begins, in which each fragment is pushed once.

        Args:
            before: Steps of the round before it, None for the first one.
            progress: Where the worker stands, and what took how long of late:
                `exchange_s` is one fragment's traffic, without waiting for others.
            fragment_count: Fragments of the model.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fixed(Pace):
    """As many steps in each round.

    Attributes:
        steps: How many.
    """

    steps: int

    @override
    def step_count(
        self, before: int | None, progress: Progress, fragment_count: int = 1
    ) -> int:
        del before, progress, fragment_count
        return self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing(Pace):
    """Longer rounds later on: `first`, and `by` more in each round, up to `most`.

    Early rounds are short, while values move fast, and late ones long. With rounds that
    grow in a line, n workers need about n exchanges however long they train
    (Spiridonoff et al., "Communication-efficient SGD: From Local SGD to One-Shot
    Averaging", arXiv 2106.04759). H follows from the clock, so all workers of a
    synchronous job have the same, a joiner too.

    Attributes:
        first: Steps of the job's first round.
        by: What each round has more than the one before it.
        most: Steps of the longest round.
    """

    first: int = 1
    by: float = 1.0
    most: int = MOST_DEFAULT

    def __post_init__(self) -> None:
        refuse_numbers(STEPS, "Growing", first=self.first)
        refuse_numbers(replace(STEPS, least=self.first), "Growing", most=self.most)
        refuse_numbers(_GROWTH, "Growing", by=self.by)

    @override
    def step_count(
        self, before: int | None, progress: Progress, fragment_count: int = 1
    ) -> int:
        del before
        number = (progress.clock - 1) // fragment_count
        return min(self.most, self.first + math.floor(self.by * number))


@dataclass(frozen=True, slots=True)
class ShareOfTime(Pace):
    """As many steps as keep traffic under a share of the time.

    With c seconds a step and t seconds of traffic a round, H = t (1 - share) / (share
    c), and a tenth more. The time that a worker waits for others is no traffic: if it
    counted, each worker of a synchronous job would answer a longer round of another one
    with a longer round of its own. As it is, fast and slow workers come to rounds of
    the same time, with more steps for the fast ones.

    The choice stays while traffic keeps its share with it and it is no more than a
    quarter too long; it changes at most fourfold at once. It depends on the clock of
    the machine, so two runs differ.

    Attributes:
        share: Largest share of the time for traffic, between 0 and 1.
        least: Steps of the shortest round.
        most: Steps of the longest round. Where traffic would need longer ones, it
            takes more than its share.
        first: Steps of the first round, before anything is measured.
    """

    share: float = 0.1
    least: int = 1
    most: int = MOST_DEFAULT
    first: int = FIRST_DEFAULT

    def __post_init__(self) -> None:
        refuse_numbers(_SHARE, "ShareOfTime", share=self.share)
        refuse_numbers(STEPS, "ShareOfTime", least=self.least, first=self.first)
        refuse_numbers(replace(STEPS, least=self.least), "ShareOfTime", most=self.most)

    @override
    def step_count(
        self, before: int | None, progress: Progress, fragment_count: int = 1
    ) -> int:
        if before is None:
            return self._within(self.first)
        step_s, exchange_s = progress.compute_s, fragment_count * progress.exchange_s
        if step_s <= 0 or exchange_s <= 0:  # not known
            return self._within(before)
        wanted = exchange_s * (1 - self.share) / (self.share * step_s)
        if wanted <= before <= max(_KEPT * wanted, 1):
            return self._within(before)
        wanted *= _HEADROOM
        wanted = min(max(wanted, before / _GROWTH_MAX), before * _GROWTH_MAX)
        return self._within(math.ceil(wanted))

    def _within(self, steps: int) -> int:
        return min(max(steps, self.least), self.most)


_EVERY: Final = replace(
    STEPS, why="give one, psworker.Growing(...) or psworker.ShareOfTime(share)"
)

Every = int | Growing | ShareOfTime
"""What `every=` takes."""


def pace_of(every: Every | Pace) -> Pace:
    """The pace that `every=` names.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(every, Pace) and not isinstance(every, type):
        return every
    refuse_numbers(_EVERY, every=every)
    assert isinstance(every, int), "it was checked"
    return Fixed(every)


class Timing:
    """What steps and pushes took of late. Not safe for threads.

    Means, not medians: a step with a hiccup is a part of what steps take.

    Attributes:
        now: A clock that only goes on, in seconds.
        push_s: What the newest push took, from its begin to its answer. Any thread may
            set it.
    """

    __slots__ = ("_pushes_s", "_stepped_at", "_steps_s", "now", "push_s")

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.push_s = 0.0
        self._stepped_at = 0.0
        self._steps_s: deque[float] = deque(maxlen=_STEP_WINDOW)
        self._pushes_s: deque[float] = deque(maxlen=_PUSH_WINDOW)

    def note_step(self) -> None:
        """A local step is done: it took all since the one before it, or since a wait.

        How long the first one took is not known.
        """
        before, self._stepped_at = self._stepped_at, self.now()
        if before:
            self._steps_s.append(self._stepped_at - before)

    def end_wait(self) -> float:
        """The script has waited for a push; the time when that is over."""
        self._stepped_at = self.now()
        return self._stepped_at

    def note_push(self, peer_wait_s: float) -> None:
        """Notes the push that took `push_s`.

        Args:
            peer_wait_s: What of that the push has waited for those of others.
        """
        self._pushes_s.append(max(0.0, self.push_s - peer_wait_s))

    @property
    def compute_s(self) -> float:
        """Of a step; 0 before the first."""
        return sum(self._steps_s) / max(1, len(self._steps_s))

    @property
    def exchange_s(self) -> float:
        """Of a push's traffic; 0 before the first."""
        return sum(self._pushes_s) / max(1, len(self._pushes_s))
