"""Which of the batches that a script has drawn are behind the next push.

A script draws a batch, calls a model with it, and a backward pass reaches what the call
returned: only then is the batch behind a gradient. A script may skip batches, and draw
some ahead, so that neither the newest nor the oldest is always the one that is trained.

A call is of the batches whose memory it is given. Where a script has made other tensors
of a batch first (moved it to a device, augmented it), the call is of the oldest batch
that no call was of yet, but for two clues: rows that only another batch has, and
batches that the script has thrown away meanwhile. A further call of such kind without
another draw is of the same batch: a GAN calls its model again with what it made.

A step begins a round of the script's loop, or goes on with the one before: no
checkpoint is cut within a round. See `Round`.

Pure: no tensors, no locks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from pswire.leased_data import DataRange

BATCH_COUNT_MAX: Final = 1000
"""Batches of a loader that may wait for a backward pass; older ones are skipped."""


class BatchMemory(Protocol):
    """What is known of the memory of a batch."""

    @property
    def is_alive(self) -> bool:
        """Whether the script, or a graph, still holds some of it."""
        ...


class CallInputs(Protocol):
    """What a model was called with."""

    @property
    def row_count(self) -> int | None:
        """Length of the first tensor, `None` without one."""
        ...

    def are_of(self, memory: BatchMemory) -> bool:
        """Whether some of it is the memory of a batch."""
        ...

    def are_elsewhere(self, memory: BatchMemory) -> bool:
        """Whether it lies on another device than a batch, which may be freed then."""
        ...


@dataclass(slots=True, eq=False)
class Batch:
    """A batch that was handed to the script, until a push carries it.

    Attributes:
        loader: Name of the loader.
        sample_count: Its samples.
        data_range: The leased range it is of, if any.
        memory: Its tensors, `None` if it has none.
        is_called: Whether a model was called with it.
        is_trained: Whether a backward pass has reached such a call since the last push.
        is_given_up: Whether its iteration was ended early, so that only a call with
            its memory is of it.
        is_pushed: Whether a push has carried it.
        is_lost: Whether it was given to other workers while the script has it in hand.
    """

    loader: str
    sample_count: int
    data_range: DataRange | None = None
    memory: BatchMemory | None = None
    is_called: bool = False
    is_trained: bool = False
    is_given_up: bool = False
    is_pushed: bool = False
    is_lost: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether new gradients are of it only if a call with its memory shows it."""
        return self.is_trained or self.is_given_up

    @property
    def is_alive(self) -> bool:
        """Whether it is known to be held still."""
        return self.memory is not None and self.memory.is_alive


@dataclass(slots=True, eq=False)
class _Draws:
    """What was drawn from one loader.

    Attributes:
        batches: Those that no push has carried, in the order of drawing.
        current: The batch that the newest call was of.
        has_turn: Whether a call of unknown memory may be of another batch than that.
        is_over: Whether the loader has said that there is no more.
        is_known: Whether a call was given the memory of a batch before.
        is_ahead: Whether the newest step had newer batches than its own drawn already.
    """

    batches: list[Batch] = field(default_factory=list)
    current: Batch | None = None
    has_turn: bool = False
    is_over: bool = False
    is_known: bool = False
    is_ahead: bool = False

    @property
    def in_hand(self) -> list[Batch]:
        """Batches that nothing was done with yet."""
        return [each for each in self.batches if not (each.is_called or each.is_closed)]

    def passed_over_by(self, newest: Batch) -> list[Batch]:
        """Batches that will be behind no step, after one that is of this as its newest.

        Notes whether the script draws ahead.
        """
        older: list[Batch] = []
        self.is_ahead = False
        is_newer = False
        for each in self.batches:
            if each is newest:
                is_newer = True
            elif is_newer:
                self.is_ahead |= not (each.is_called or each.is_given_up)
            elif not (each.is_trained or each.is_alive):
                older.append(each)
        return older


@dataclass(slots=True)
class Round:
    """Steps that belong together, such as those of a GAN on one batch.

    A round begins with the first step after a second batch of a loader was asked for,
    be it that no batch is behind the step. Of batches that were drawn ahead each begins
    one as it is stepped with. Without a loader, or after its end, a round has one step
    of each optimizer.

    Attributes:
        drawn: Loaders of which a batch was drawn for it.
        is_over: Whether the next step begins another one.
        pushed: Loaders of which a batch was pushed in it.
        stepped: Optimizers that were stepped in it.
    """

    drawn: set[str] = field(default_factory=set)
    is_over: bool = True
    pushed: set[str] = field(default_factory=set)
    stepped: set[str] = field(default_factory=set)

    def draw(self, loader: str) -> None:
        """A batch is handed out."""
        self.end(loader)
        self.drawn.add(loader)

    def end(self, loader: str) -> None:
        """The script asks for a batch."""
        if loader in self.drawn:
            self.drawn.clear()
            self.is_over = True

    def goes_on(self, optimizer: str, *, has_loader: bool) -> bool:
        """Whether a step of an optimizer would not begin another round.

        Args:
            optimizer: Which one.
            has_loader: Whether some loader has more for the script.
        """
        return not self.is_over and (has_loader or optimizer not in self.stepped)

    def step(self, optimizer: str, loaders: set[str], *, has_loader: bool) -> bool:
        """A step is made; returns whether it goes on with the round before.

        Args:
            optimizer: Which one is stepped.
            loaders: Whose batches are behind it.
            has_loader: Whether some loader has more for the script.
        """
        is_new = not self.goes_on(optimizer, has_loader=has_loader)
        is_new |= bool(loaders & self.pushed)
        if is_new:
            self.is_over = False
            self.pushed.clear()
            self.stepped.clear()
        self.pushed |= loaders
        self.stepped.add(optimizer)
        return not is_new


class PushedBatches(NamedTuple):
    """What a push carries, and what is settled with it.

    Attributes:
        trained: Batches that are behind its gradient.
        passed_over: Older ones that will be behind none.
        is_of_lost: Whether some of its gradient is of batches that others have now.
        continues_round: Whether it is a further step of a round.
    """

    trained: tuple[Batch, ...]
    passed_over: tuple[Batch, ...]
    is_of_lost: bool
    continues_round: bool


class DrawnBatches:
    """Batches of all loaders of a worker that no push has carried yet.

    Attributes:
        sees_calls: Whether a backward pass has reached a call ever: else it has to be
            guessed, as of a script that uses bare parameters, or a compiled model.
        in_doubt: Sample counts of the batches of which the last call could have been
            any, if that makes a difference.
    """

    def __init__(self, optimizer_count: int = 1) -> None:
        """With one optimizer, a step ends what is done with a batch."""
        self._draws: dict[str, _Draws] = {}
        self._optimizer_count = optimizer_count
        self._round = Round()
        self.sees_calls = False
        self.in_doubt: tuple[int, ...] = ()

    @property
    def has_trained(self) -> bool:
        """Whether a batch is known to be behind the gradient that is there."""
        return any(each.is_trained for each in self.waiting)

    @property
    def waiting(self) -> list[Batch]:
        """All that no push has carried."""
        return [each for draws in self._draws.values() for each in draws.batches]

    def draw(self, batch: Batch) -> tuple[Batch, ...]:
        """Notes a batch that is handed out; returns those that are too old by now."""
        draws = self._draws.get(batch.loader)
        if draws is None:
            draws = self._draws[batch.loader] = _Draws()
        self._round.draw(batch.loader)
        draws.batches.append(batch)
        draws.has_turn = True
        draws.is_over = False
        if len(draws.batches) <= BATCH_COUNT_MAX:
            return ()
        return (draws.batches.pop(0),)

    def end(self, loader: str) -> None:
        """A loader has no more for the script, which may have drawn ahead."""
        draws = self._draws.setdefault(loader, _Draws())
        draws.is_over = draws.has_turn = True
        self._round.end(loader)

    def call(self, inputs: CallInputs) -> tuple[Batch, ...]:
        """A model was called where gradients are recorded: the batches it was of."""
        found = [
            (draws, _found(draws, inputs))
            for draws in tuple(self._draws.values())
            if draws.batches
        ]
        chosen: list[Batch] = []
        is_any_known = any(of_memory for _, of_memory in found)
        for draws, of_memory in found:
            if of_memory:
                draws.is_known = True
                batches = of_memory
            elif is_any_known and draws.is_known:
                continue  # the call is of another loader's
            else:
                batches = self._guessed(draws, inputs)
            for each in batches:
                each.is_called = True
                draws.current = each
            if batches:
                draws.has_turn = False
            chosen += [each for each in batches if not each.is_pushed]
        return tuple(chosen)

    def reach(self, batches: Iterable[Batch]) -> None:
        """A backward pass has reached a call that was of these."""
        self.sees_calls = True
        for each in batches:
            each.is_trained = not each.is_pushed

    def reach_unseen(self, *, is_all: bool = False) -> None:
        """A new gradient was found, and no call was seen that it came from.

        Args:
            is_all: Whether it is taken to be of all that was drawn.
        """
        for draws in self._draws.values():
            open_ones = [each for each in draws.batches if not each.is_closed]
            alive = [each for each in open_ones if each.is_alive]
            if len(alive) > 1:
                self.in_doubt = tuple(each.sample_count for each in alive)
            for each in open_ones if is_all else alive[:1] or open_ones:
                each.is_trained = True

    def has_open(self, loader: str) -> bool:
        """Whether there are batches of a loader that a step may be of yet."""
        draws = self._draws.get(loader, _Draws())
        return not all(each.is_given_up for each in draws.batches)

    def has_ahead(self, loader: str) -> bool:
        """Whether a script that asks for more goes on with what it has drawn before.

        One that draws ahead has newer batches than that of the step at each step. One
        that skips batches has none, and holds at most the newest.
        """
        draws = self._draws.get(loader, _Draws())
        in_hand = draws.in_hand
        if draws.is_ahead:
            return bool(in_hand)
        return len([each for each in in_hand if each.is_alive]) > 1

    def give_up(self, loader: str) -> tuple[Batch, ...]:
        """An iteration was ended early: its batches that are behind no gradient.

        They wait on, for a script that goes on with the last one.
        """
        draws = self._draws.get(loader)
        if draws is None:
            return ()
        given_up = tuple(each for each in draws.batches if not each.is_closed)
        for each in given_up:
            each.is_given_up = True
        return given_up

    def throw_away(self) -> None:
        """Forgets what is behind the gradient that was begun and thrown away."""
        for each in self.waiting:
            each.is_trained = False

    def goes_on(self, optimizer: str) -> bool:
        """Whether a step of an optimizer would belong to the round of the one before.

        But for batches that were drawn ahead, which nobody can tell before the step.
        """
        return self._round.goes_on(optimizer, has_loader=self._has_loader)

    @property
    def _has_loader(self) -> bool:
        """Whether some loader has more for the script."""
        return any(draws.batches or not draws.is_over for draws in self._draws.values())

    def push(self, optimizer: str = "") -> PushedBatches:
        """Takes what is behind the gradient of a step of an optimizer."""
        has_loader = self._has_loader
        trained: list[Batch] = []
        passed_over: list[Batch] = []
        for draws in self._draws.values():
            own = [each for each in draws.batches if each.is_trained]
            if own:
                trained += own
                passed_over += draws.passed_over_by(own[-1])
                draws.batches = [
                    each
                    for each in draws.batches
                    if not (each.is_trained or each in passed_over)
                ]
            if self._optimizer_count == 1 or draws.is_over:
                draws.has_turn = True
        for each in trained:
            each.is_trained = False
            each.is_pushed = True
        kept = tuple(each for each in trained if not each.is_lost)
        return PushedBatches(
            kept,
            tuple(passed_over),
            is_of_lost=len(kept) < len(trained),
            continues_round=self._round.step(
                optimizer, {each.loader for each in trained}, has_loader=has_loader
            ),
        )

    def lose(self) -> None:
        """Notes that what was leased and not pushed is other workers' now.

        A script that has some of it in hand may train on it yet: such a gradient must
        not count. Batches of a split of the script's own stay its own.
        """
        for draws in self._draws.values():
            kept: list[Batch] = []
            for each in draws.batches:
                each.is_trained = False
                if each.data_range is None or each.is_alive or draws.is_ahead:
                    each.is_lost |= each.data_range is not None
                    each.data_range = None
                    kept.append(each)
                else:
                    each.is_pushed = True  # a call that is of it reaches nothing
            draws.batches = kept

    def _guessed(self, draws: _Draws, inputs: CallInputs) -> list[Batch]:
        """The batches of a loader that a call of unknown memory is of."""
        current = draws.current
        is_held = draws.is_known and current is not None and current.is_alive
        fresh = [
            each for each in draws.batches if not (each.is_called or each.is_given_up)
        ]
        if not fresh or not draws.has_turn or is_held:
            is_open = current is not None and not current.is_pushed
            return [current] if current is not None and is_open else []
        fits = [each for each in fresh if each.sample_count == inputs.row_count]
        if not fits:
            if (several := _adding_up(fresh, inputs.row_count)) is not None:
                return several
            fits = fresh
            if len({each.sample_count for each in fresh}) > 1:
                self.in_doubt = tuple(each.sample_count for each in fresh)
        alive = [
            each
            for each in fits
            if each.is_alive
            and each.memory is not None
            and not inputs.are_elsewhere(each.memory)
        ]
        return [(alive or fits)[0]]


def _found(draws: _Draws, inputs: CallInputs) -> list[Batch]:
    """The batches of a loader whose memory a call was given."""
    found = [
        each
        for each in draws.batches
        if each.memory is not None and inputs.are_of(each.memory)
    ]
    last = draws.current
    if last is not None and last.is_pushed and last.memory is not None:
        found += [last] if inputs.are_of(last.memory) else []
    return found


def _adding_up(batches: Sequence[Batch], row_count: int | None) -> list[Batch] | None:
    """The oldest batches that have so many rows together, if any do."""
    total = 0
    for position, each in enumerate(batches, 1):
        total += each.sample_count
        if total == row_count:
            return list(batches[:position])
    return None
