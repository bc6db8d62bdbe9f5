"""The rounds of a worker that takes local steps, as a pure state machine.

A model goes to the job in fragments that take turns, one for a small model. Kept here:
which push is under way, how many local steps are behind each fragment, and which data.
A range of samples is done with when every fragment has been pushed since it was drawn,
and goes with the last of these pushes. No tensors, no calls, no clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import add, sub
from typing import Final, NamedTuple

import xxhash

from pswire.leased_data import DataRange

_NOTHING_IS_SENT: Final = "no push is under way"


def fragment_in_turn(number: int, fragment_count: int) -> int:
    """The fragment of a clock, or of a worker's own pushes: 0, 1, 2, 0, ...

    Args:
        number: Clock that the push completes, or number of the push; from 1.
        fragment_count: Fragments of the model.
    """
    return (number - 1) % fragment_count


def fragment_drawn(clock: int, fragment_count: int) -> int:
    """The fragment of a clock that some workers miss: a drawn order in each cycle.

    All fragments have one clock of each cycle. A worker that comes to each second or
    third clock only would meet the same few in a fixed order.

    Args:
        clock: Clock that the push completes, from 1.
        fragment_count: Fragments of the model.
    """
    cycle, place = divmod(clock - 1, fragment_count)
    order = sorted(
        range(fragment_count),
        key=lambda fragment: xxhash.xxh3_64_intdigest(b"%d/%d" % (cycle, fragment)),
    )
    return order[place]


class LocalWork(NamedTuple):
    """Local steps, and what was in them.

    Attributes:
        step_count: Steps of the inner optimizer.
        sample_count: Samples behind these, as far as a loader has counted them.
        token_count: Tokens behind these, as far as the script has counted them.
    """

    step_count: int = 0
    sample_count: float = 0
    token_count: int = 0

    def plus(self, other: "LocalWork") -> "LocalWork":
        """Both together."""
        return LocalWork(*map(add, self, other))

    def minus(self, other: "LocalWork") -> "LocalWork":
        """What is left without the other, which is part of it."""
        return LocalWork(*map(sub, self, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a worker stands, when a strategy is asked what comes next.

    Attributes:
        fragment: Fragment of the next push, from 0.
        work: Local steps behind it: those since it was pushed last.
        steps_since_push: Local steps since the newest push of any fragment began.
        total_step_count: Local steps of this start of the worker.
        push_count: Pushes of this start that have counted.
        clock: Clock that the next push completes.
        rank: The worker's place in the job.
        worker_count: Workers of the job.
        compute_s: Seconds of a local step, measured lately; 0 where nothing is known.
        exchange_s: Seconds of a push, measured lately; 0 where nothing is known.
    """

    fragment: int = 0
    work: LocalWork = field(default_factory=LocalWork)
    steps_since_push: int = 0
    total_step_count: int = 0
    push_count: int = 0
    clock: int = 1
    rank: int = 0
    worker_count: int = 1
    compute_s: float = 0.0
    exchange_s: float = 0.0

    @property
    def step_count(self) -> int:
        """Local steps behind the fragment of the next push."""
        return self.work.step_count

    @property
    def sample_count(self) -> float:
        """Samples behind the fragment of the next push."""
        return self.work.sample_count


@dataclass(frozen=True, slots=True)
class Sent:
    """A push of a fragment, from its beginning until it is settled and taken.

    Attributes:
        fragment: Which one.
        work: Local steps behind it.
        new_work: Those of these that no push of any fragment was of before.
        ranges: Data that is done with if it counts.
    """

    fragment: int
    work: LocalWork
    new_work: LocalWork
    ranges: tuple[DataRange, ...]


@dataclass(slots=True)
class _Held:
    """Data that was trained, in order of time.

    Attributes:
        ranges: Where it is from.
        missing: Fragments that were not pushed since.
    """

    ranges: list[DataRange]
    missing: frozenset[int]


class Rounds:
    """The rounds of one worker.

    A push begins, is settled when the job has answered, and is taken by the script's
    thread, between two local steps, if it has counted. One is on its way at a time.

    Attributes:
        fragment_count: Fragments of the model.
        taken_after: Local steps between the begin of a push and the moment when what
            came back is taken; 0 where the script waits for it.
        total_step_count: Local steps of this start of the worker.
        push_count: Pushes of this start that have counted.
        is_new: Whether the worker has taken no local step since it has joined.
        takes_part: Whether it trains in the round under way, as far as that was asked.
        sent: The push that is on its way, or settled and not yet taken.
        was_missed: Whether the newest push came too late to count. The next one is then
            due at once: whoever waits for a full round again is late again.
    """

    def __init__(self, fragment_count: int = 1, taken_after: int = 0) -> None:
        self.fragment_count = fragment_count
        self.taken_after = taken_after
        self._ahead = LocalWork()  # that the next step is of, as noted before it
        self.start_over()

    def start_over(self) -> None:
        """The worker has joined anew: what it did before is not its own any more."""
        self.is_new = True
        self.takes_part = False
        self.total_step_count = 0
        self.push_count = 0
        self._ahead = self._ahead._replace(sample_count=0)
        self._since_push = LocalWork()  # since the newest push began
        self.sent: Sent | None = None
        self.was_missed = False
        self._is_settled = False
        self._behind = [LocalWork()] * self.fragment_count
        self._held: list[_Held] = []
        self._sent_held_count = 0  # those that were there when the push began

    # Local steps

    def note_tokens(self, token_count: int) -> None:
        """The next local step is of so many tokens more."""
        self._ahead = self._ahead.plus(LocalWork(0, 0, token_count))

    def drop_step(self) -> None:
        """A local step has changed nothing, as its data is not this worker's."""
        self._ahead = self._ahead._replace(token_count=0)

    def note_step(
        self, sample_count: float = 0, ranges: Iterable[DataRange] = ()
    ) -> None:
        """A local step was taken, with so much data behind it."""
        step, self._ahead = self._ahead.plus(LocalWork(1, sample_count)), LocalWork()
        self._behind = [each.plus(step) for each in self._behind]
        self.total_step_count += 1
        self._since_push = self._since_push.plus(step)
        self._hold(ranges)

    def note_step_of_other(
        self, sample_count: float, ranges: Iterable[DataRange]
    ) -> None:
        """An optimizer has stepped by whose steps rounds are not counted."""
        self._ahead = self._ahead.plus(LocalWork(0, sample_count))
        self._hold(ranges)

    def _hold(self, ranges: Iterable[DataRange]) -> None:
        new = list(ranges)
        if not new:
            return
        self._held.append(_Held(new, frozenset(range(self.fragment_count))))
        sent_count = self._sent_held_count
        self._held[sent_count:] = _joined(self._held[sent_count:])

    def work_behind(self, fragment: int) -> LocalWork:
        """Local steps since a fragment was pushed last, by a push that counted.

        Those behind a push that is on its way count until it is settled.
        """
        return self._behind[fragment]

    @property
    def steps_since_push(self) -> int:
        """Local steps since the newest push began."""
        return self._since_push.step_count

    @property
    def unsent_step_count(self) -> int:
        """Local steps that did not go with a push of every fragment that counted."""
        return max(work.step_count for work in self._behind)

    @property
    def is_clean(self) -> bool:
        """Whether every local step and all data has gone with a push that counted."""
        return not (self.unsent_step_count or self._held or self.sent)

    @property
    def held_ranges(self) -> tuple[DataRange, ...]:
        """Data that was trained, and that no push which counted has named yet."""
        return tuple(each for held in self._held for each in held.ranges)

    # Pushes

    def begin(self, fragment: int) -> Sent:
        """A push of a fragment begins, with all that is behind it now."""
        assert self.sent is None, "one push is under way at a time"
        last = frozenset((fragment,))
        self._sent_held_count = len(self._held)
        self._is_settled = False
        # Last of what says that it has begun: Ctrl-C may come between any two lines.
        self.sent = Sent(
            fragment,
            self._behind[fragment],
            self._since_push,
            tuple(
                each
                for held in self._held
                if held.missing == last
                for each in held.ranges
            ),
        )
        self._since_push = LocalWork()
        self.was_missed = False
        return self.sent

    def settle(self, *, has_counted: bool) -> None:
        """The job has answered the push.

        Args:
            has_counted: Whether it is done with. If not, the job went on without it:
                what is behind it goes with a later push, and there is nothing to take.
        """
        sent = self.sent
        assert sent is not None, _NOTHING_IS_SENT
        if has_counted:
            self._is_settled = True
            self.push_count += 1
            fragment = sent.fragment
            self._behind[fragment] = self._behind[fragment].minus(sent.work)
            for held in self._held[: self._sent_held_count]:
                held.missing -= {fragment}
        else:
            self.sent = None
            self.was_missed = True
        self.takes_part = False
        self._sent_held_count = 0
        self._held = _joined(self._held)

    def give_up(self) -> tuple[DataRange, ...]:
        """What no push which counted was of is done with; its data."""
        assert self.sent is None, "what is under way may count"
        ranges = self.held_ranges
        self._behind = [LocalWork()] * self.fragment_count
        self._held = []
        self.was_missed = False
        return ranges

    @property
    def is_settled(self) -> bool:
        """Whether there is something to take: the answer to a push that counted."""
        return self.sent is not None and self._is_settled

    @property
    def is_ripe(self) -> bool:
        """Whether a push began long enough ago to take what comes back."""
        return self.sent is not None and self.steps_since_push >= self.taken_after

    def take(self) -> int:
        """The answer is taken; the fragment that it is of."""
        sent = self.sent
        assert sent is not None, _NOTHING_IS_SENT
        assert self._is_settled, "the job has answered before"
        self.sent = None
        return sent.fragment


def _joined(held: Iterable[_Held]) -> list[_Held]:
    """The same data, without what is done with, in as few parts as tell it apart.

    What is older lacks no fragment that newer data does not lack, so that there are no
    more parts than fragments.
    """
    joined: list[_Held] = []
    for each in held:
        if joined and joined[-1].missing == each.missing:
            joined[-1].ranges += each.ranges
        elif each.missing:
            joined.append(each)
    return joined
