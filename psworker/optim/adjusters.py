"""What adjusts an optimizer between its steps: schedulers and loss scales.

A push has the number of steps that each scheduler of its worker has taken. Those of a
worker that joins later take as many, and one more where the last pushes show that one
comes after each. Where they do not, it may be one behind until its first step, which
shows where the others are at one clock.

A script steps some schedulers at the end of each epoch, also of those that are over,
which yield nothing to it. These steps are among those that the job has taken.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from psworker.optim.push_result import PushResult


class Schedules:
    """The schedulers that `prepare` was given for optimizers, in its order."""

    def __init__(
        self, schedulers: Iterable[LRScheduler], *optimizers: Optimizer
    ) -> None:
        """Finds those of some optimizers among all that `prepare` was given."""
        self._optimizers = optimizers
        self._schedulers = [
            each
            for each in schedulers
            if any(
                getattr(own, "optimizer", None) is optimizer
                for own in parts(each)
                for optimizer in optimizers
            )
        ]
        # As they are given, to begin with again.
        self._first_states = [
            copy.deepcopy(each.state_dict()) for each in self._schedulers
        ]
        self._first_groups = [
            [
                {name: _copied(group[name]) for name in self._scheduled(optimizer)}
                for group in optimizer.param_groups
            ]
            for optimizer in optimizers
        ]
        # By epoch, the steps taken when the script came to it, and how many of them
        # after the last batch of the one before. Of the first one, in whose middle this
        # process may have joined, nobody knows that.
        self._entered: dict[int, list[tuple[int, int | None]]] = {}
        self._epoch = -1
        self._drawn_at: tuple[int, ...] = self.steps
        # Which ones the script steps between two batches of an epoch.
        self._is_by_batch = [False] * len(self._schedulers)
        # At the first batch of which epoch a step of whom is due; see `await_script`.
        self._due: tuple[int, list[LRScheduler]] = (0, [])

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that each has taken."""
        return tuple(_steps_of(each) for each in self._schedulers)

    def _scheduled(self, optimizer: Optimizer) -> list[str]:
        """Hyperparameters that they set."""
        own = [part for each in self._schedulers for part in parts(each)]
        cycled = any(getattr(part, "cycle_momentum", False) for part in own)
        names = ("lr", "momentum", "betas") if cycled else ("lr",)
        return [name for name in names if name in optimizer.defaults]

    @property
    def follows_metric(self) -> bool:
        """Whether a rate depends on what the job has measured so far."""
        return any(isinstance(each, ReduceLROnPlateau) for each in self._schedulers)

    def catch_up(self, before: Sequence[int], wanted: Sequence[int]) -> None:
        """Has each take the steps that the job's has taken and it has not.

        Those that follow a metric stay: the metrics of then are not known here.

        Args:
            before: `steps` when the push was made that is compared.
            wanted: Those of the push whose settings counted.
        """
        if len(wanted) != len(self._schedulers):
            return  # that worker has others
        for each, own, theirs in zip(self._schedulers, before, wanted, strict=True):
            if not isinstance(each, ReduceLROnPlateau):
                for _ in range(theirs - own):
                    each.step()
        self._drawn_at = self.steps

    def begin_again(self) -> None:
        """Sets all back to what they were when they were given.

        But for those that follow a metric, which are no function of their steps.
        """
        self.end_wait()
        for each, state in zip(self._schedulers, self._first_states, strict=True):
            if not isinstance(each, ReduceLROnPlateau):
                each.load_state_dict(copy.deepcopy(state))
        for optimizer, firsts in zip(self._optimizers, self._first_groups, strict=True):
            for group, first in zip(optimizer.param_groups, firsts, strict=False):
                for name, value in first.items():
                    set_hyperparameter(group, name, value)
        self._drawn_at = self.steps

    def draw(self, epoch: int) -> None:
        """The script asks for a batch of an epoch."""
        if not self._schedulers:
            return
        if self._epoch < 0:
            self._take_due(epoch)
        steps = self.steps
        between = [
            now - before for now, before in zip(steps, self._drawn_at, strict=True)
        ]
        if epoch == self._epoch:
            was = zip(self._is_by_batch, between, strict=True)
            self._is_by_batch = [is_so or taken > 0 for is_so, taken in was]
        elif epoch not in self._entered:
            is_first = self._epoch < 0
            self._entered[epoch] = [
                (now, None if is_first else taken)
                for now, taken in zip(steps, between, strict=True)
            ]
        self._epoch = epoch
        self._drawn_at = steps

    def enter_again(self, epoch: int) -> None:
        """Takes steps that the script has taken between two epochs, and will not again.

        The job has returned to before them, and the script goes on in a later epoch.
        """
        entered = self._entered.get(epoch, [])
        for each, now, (then, between), is_by_batch in zip(
            self._schedulers, self.steps, entered, self._is_by_batch, strict=False
        ):
            lacking = then - now
            if between is not None:
                lacking = min(between, lacking)
            elif is_by_batch:
                lacking = 0  # the script has made all of them with its batches
            if not isinstance(each, ReduceLROnPlateau):
                for _ in range(lacking):
                    each.step()

    def await_script(
        self, before: Sequence[int], taken: Sequence[int], new_epoch: int = 0
    ) -> None:
        """Leaves out steps of the script, before `end_wait`, that the job has taken.

        The last push of an epoch has not the step that follows at its end. A script
        that goes through all epochs takes it. For one that begins with `new_epoch`
        itself that is done here, if as many steps as the epochs before had ends but
        for the last show that it is stepped so.

        Args:
            before: `steps` as the script has left them. A scheduler that it has loaded
                has steps of before the job.
            taken: Of each scheduler, the steps that the job's has taken.
            new_epoch: The one that the job comes to next; 0 if it is in the middle of
                one.
        """
        if len(taken) != len(self._schedulers):
            return
        counts = [theirs - own for own, theirs in zip(before, taken, strict=True)]
        for each, count in zip(self._schedulers, counts, strict=True):
            _leave_out(each, count)
        due = [
            each
            for each, count in zip(self._schedulers, counts, strict=True)
            if count == new_epoch - 1 and not isinstance(each, ReduceLROnPlateau)
        ]
        self._due = (new_epoch, due if new_epoch else [])

    def _take_due(self, epoch: int) -> None:
        """The script asks for its first batch: of an epoch that it has begun with?"""
        new_epoch, due = self._due
        for each in due:
            before = getattr(type(each), _CLASS_BEFORE)
            if epoch == new_epoch and not getattr(type(each), _CALLED)[0]:
                before.step(each)

    def end_wait(self) -> None:
        """The script has come to where the job is: all of its steps count."""
        self._due = (0, [])
        for each in self._schedulers:
            each.__class__ = getattr(type(each), _CLASS_BEFORE, type(each))


def set_hyperparameter(group: dict[str, Any], name: str, value: Any) -> None:  # noqa: ANN401
    """Sets one of a group; a tensor keeps its identity, since others may hold it."""
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _copied(value: Any) -> Any:  # noqa: ANN401, a hyperparameter
    return value.clone() if isinstance(value, torch.Tensor) else value


_CLASS_BEFORE: Final = "_psworker_class_before"
_CALLED: Final = "_psworker_called"


def _leave_out(scheduler: LRScheduler, count: int) -> None:
    """Leaves out the next steps of a scheduler.

    By its class, for its own attributes are what `state_dict` saves.
    """
    before = type(scheduler)
    called = [0]

    def step(self: Any, *args: Any, **named: Any) -> None:  # noqa: ANN401, as torch's
        called[0] += 1
        if called[0] > count:
            before.step(self, *args, **named)

    members = {
        "step": step,
        _CLASS_BEFORE: before,
        _CALLED: called,
        "__module__": before.__module__,
    }
    scheduler.__class__ = type(before.__name__, (before,), members)


def parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """A scheduler, and those that chains and sequences are made of."""
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from parts(each)


def _steps_of(scheduler: LRScheduler) -> int:
    return max(int(getattr(each, "last_epoch", 0)) for each in parts(scheduler))


class LossScales:
    """The scalers of a script, as far as one of its optimizers is concerned.

    Each scaler sees only what is infinite in this process. A clock that the shards have
    skipped is noted in it as if that had been found here, so that the next `update()`
    lowers the scale of every worker that has stepped.
    """

    def __init__(self, scalers: Iterable[GradScaler] = ()) -> None:
        self.scalers = tuple(each for each in scalers if each.is_enabled())

    def __bool__(self) -> bool:
        return bool(self.scalers)

    def note(self, optimizer: Optimizer, result: PushResult) -> None:
        """Notes the result of a step in the scaler of its optimizer."""
        if not (result.skipped or result.nonfinite_worker_ids):
            return
        for scaler in self.scalers:
            # By device; nothing, for a scaler that does not step this optimizer.
            for found in scaler._found_inf_per_device(optimizer).values():
                found.fill_(1.0)
