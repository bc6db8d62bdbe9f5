"""Carries a strategy out: has a job train twins of the script's models.

Everything a job does, it does for the twins: from below, a worker with local steps is
one that steps an outer optimizer now and then.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pswire.schema import INNER_STATE_MODEL
from psworker.backends.backend import GROUP_STRATEGY_TEXT, Backend
from psworker.errors import ConfigurationError, PsError, UnsupportedError
from psworker.optim.buffer_policies import warn_of_defaults
from psworker.optim.checks import check_objects, check_options_with_strategy
from psworker.optim.named_objects import NamedObjects
from psworker.optim.prepare import KINDS, PrepareOptions
from psworker.optim.published import Published
from psworker.optim.wrappers import data_parallel_in
from psworker.strategies.anchors import Anchors
from psworker.strategies.inner_state import InnerStates
from psworker.strategies.outer_steps import LATE_TEXT, OuterSteps
from psworker.strategies.rounds import Progress
from psworker.strategies.strategy import (
    Strategy,
    answer_of,
    check_strategy,
    mode_problem,
    outer_of,
    terms_of,
)

logger: Final = logging.getLogger("psworker")

OUTER_NAME: Final = "outer"
"""Of the outer optimizer in the job; of fragment 1 of several `outer.1`."""


class Engine:
    """Trains a script's models with local steps: an `optim.prepare.LocalTraining`.

    In the script's thread. `script_hooks.hook_script` has it called at each step.

    Attributes:
        replaced: What `prepare` returns in the place of an object, by its `id()`.
    """

    def __init__(
        self,
        strategy: Strategy,
        backend: Backend,
        call: NamedObjects,
        options: PrepareOptions,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Joins a job, with the twins of the models of a call of `prepare`.

        Args:
            strategy: What to do.
            backend: What trains the twins.
            call: Objects of the script.
            options: What else `prepare` was given.
            now: A clock that only goes on, in seconds.

        Raises:
            PsError: As `Connection.prepare`.
        """
        check_strategy(strategy)
        check_options_with_strategy(options)
        check_objects(call)
        if problem := mode_problem(strategy, backend.place.mode):
            raise UnsupportedError(problem)
        models = call.of_kind("model", nn.Module)
        if any(data_parallel_in(each) for each in models.values()):
            raise UnsupportedError(GROUP_STRATEGY_TEXT)
        optimizers: dict[str, Optimizer] = call.of_kind("optimizer", KINDS["optimizer"])
        self._strategy = strategy
        self._backend = backend
        self._names = {id(each): name for name, each in optimizers.items()}
        self._anchors = anchors = Anchors(
            models,
            optimizers.values(),
            fragment_count=strategy.fragment_count,
            fragment_order=strategy.fragment_order,
            buffers=options.buffers,
        )
        inner = InnerStates(strategy.inner_state, tuple(optimizers.values()))
        self.models: Sequence[nn.Module] = tuple(models.values())
        self.parameters: Sequence[torch.Tensor] = anchors.tensors
        self.optimizers: Sequence[Optimizer] = tuple(optimizers.values())
        kind = type(strategy)
        self._changes_gradients = kind.before_step is not Strategy.before_step
        self._has_turns = kind.takes_part is not Strategy.takes_part
        self._counts_samples = False
        self._is_closed = False
        outers = [outer_of(strategy, each.anchor) for each in anchors.fragments]
        twins = _twins_of(call, anchors, outers, inner.model)
        replaced = backend.join(
            twins,
            replace(
                options,
                local_training=self,
                strategy=terms_of(strategy),
                buffers=_buffer_choice(twins, anchors, inner.model),
            ),
        )
        if options.buffers is None and backend.place.rank == 0:  # once in a job
            warn_of_defaults(anchors.policies)
        self.replaced: Mapping[int, Any] = {
            id(each): replaced[id(each)]
            for each in call.objects
            if id(each) in replaced
        }
        self._worker = backend.between_pushes
        made = [replaced.get(id(each), each) for each in outers]
        kinds = [type(each) for each in outers]
        self._outer_steps = OuterSteps(
            strategy, backend, anchors, inner, made, kinds, now
        )
        self._rounds = self._outer_steps.rounds

    # What the backend calls: an `optim.prepare.LocalTraining`

    def start_over(self) -> None:
        """The worker has joined anew: it goes on from the job's values."""
        self._outer_steps.start_over()

    def end_round(self) -> None:
        """There is no more data for now: pushes what was trained, whoever waits.

        What came too late all the same is given up: its data counts as dropped.
        """
        if not self._outer_steps.push_rest():
            step_count, ranges = self._outer_steps.give_up()
            logger.warning(
                "the last %d local steps of worker %s count for nothing, and their "
                "data, %d samples or batches, counts as dropped: %s",
                step_count,
                self._backend.place.worker_id,
                sum(each.stop - each.start for each in ranges),
                LATE_TEXT,
            )
        self._show()

    def contribute(self, push_nothing: Callable[[], None]) -> None:
        """The job waits for a push of this worker, which has no data.

        Args:
            push_nothing: Makes one of weight 0.
        """
        self._outer_steps.finish()
        if self._rounds.is_clean:
            self._outer_steps.push_nothing(push_nothing)
        else:
            self._outer_steps.push(is_beside=False)

    def before_draw(self) -> None:
        """The script asks for a batch: waits for a round that is this worker's."""
        if not self._has_turns or self._rounds.takes_part:
            return
        self._begin()
        takes_part = self._strategy.takes_part
        while self._rounds.is_clean and not answer_of(
            takes_part, self._outer_steps.turn
        ):
            self._outer_steps.push_nothing()
            self._begin()
        # Asked once: who joins or is lost within a round changes nothing about it.
        self._rounds.takes_part = True

    # What the connection calls

    def publish(self, what: Sequence[Published]) -> None:
        """Makes values that the script has set those of the job, and of the anchor.

        Raises:
            ConfigurationError: A tensor belongs to no prepared model.
        """
        self._outer_steps.finish()
        self._backend.publish(self._anchors.published(what))
        self._outer_steps.has_rejoined()

    def note_tokens(self, token_count: int) -> None:
        """The next local step is of so many tokens more."""
        self._rounds.note_tokens(token_count)

    def close(self) -> None:
        """Pushes what was trained and not pushed: the script is done."""
        if self._is_closed or self._backend.is_out:
            return
        self._is_closed = True
        problem: PsError | str = ""
        try:
            if not self._outer_steps.push_rest():
                problem = LATE_TEXT
        except PsError as error:
            # The script is done, and an error now would hide that.
            problem = error
        self._show()
        if problem:
            logger.warning(
                "the last %d local steps of worker %s could not be pushed, and count "
                "for nothing; their data goes to the other workers: %s",
                self._rounds.unsent_step_count,
                self._backend.place.worker_id,
                problem,
            )

    def end(self) -> None:
        """Nothing is pushed any more."""
        self._is_closed = True
        self._outer_steps.end()

    @property
    def is_sending(self) -> bool:
        """Whether a push is under way beside the script."""
        return self._outer_steps.is_sending

    # What the hooks call

    def before_forward(self, model: nn.Module) -> None:
        """A model is called to train: with the newest values, in a round of its own."""
        rounds = self._rounds
        is_ready = not rounds.is_new and (rounds.takes_part or not self._has_turns)
        if is_ready or self._is_closed or not model.training:
            return
        if torch.is_grad_enabled():
            self._worker.refuse_out()
            self._outer_steps.go_on()
            self._begin()
            self.before_draw()

    def before_step(self, optimizer: Optimizer) -> Callable[[], None] | None:
        """An inner optimizer begins a step.

        Returns:
            What changes the gradients once they are there, if anything does.
        """
        self._outer_steps.has_data = True
        self._worker.refuse_out()
        self._outer_steps.go_on()
        if self._worker.is_void(self._names[id(optimizer)]):
            return partial(_clear_gradients, optimizer)
        self._begin()
        self.before_draw()
        return self._change_gradients if self._changes_gradients else None

    def after_step(self, optimizer: Optimizer) -> None:
        """An inner optimizer has stepped: counts that, and pushes what is due."""
        rounds = self._rounds
        drawn = self._worker.take_drawn(self._names[id(optimizer)])
        if drawn.is_of_lost or rounds.is_new:
            rounds.drop_step()
            return
        self._counts_samples |= drawn.sample_count is not None
        sample_count = drawn.sample_count or 0.0
        if optimizer is not self.optimizers[0]:
            rounds.note_step_of_other(sample_count, drawn.ranges)
            return
        self._outer_steps.timing.note_step()
        rounds.note_step(sample_count if self._counts_samples else 1.0, drawn.ranges)
        self._outer_steps.take_ripe()
        if rounds.sent is None and self._is_due():
            self._outer_steps.push(is_beside=self._strategy.taken_after > 0)
        self._show()

    def _begin(self) -> None:
        """Takes the newest values, before all else that the script does."""
        if self._rounds.is_new:
            if self._worker.arrive() and not self._outer_steps.has_rejoined():
                self._outer_steps.start_over()
            self._rounds.is_new = False

    def _change_gradients(self) -> None:
        with torch.no_grad():
            for fragment in self._anchors.fragments:
                self._strategy.before_step(fragment.local, fragment.anchor)

    def _is_due(self) -> bool:
        """Whether a push is due; shows how long the round is, where that is new."""
        progress = self._outer_steps.progress
        is_due = answer_of(self._strategy.is_due, progress)
        steps = self._strategy.round_step_count or 0
        if steps != self._backend.work.round_step_count:
            self._show_round(steps, progress)
        return is_due or (self._rounds.was_missed and progress.step_count > 0)

    def _show(self) -> None:
        """Shows with the job where the worker stands."""
        work = self._backend.work
        sent = self._rounds.sent if self.is_sending else None
        work.steps_since_push = self._rounds.steps_since_push
        work.fragment_under_way = sent.fragment + 1 if sent is not None else 0

    def _show_round(self, steps: int, progress: Progress) -> None:
        """Shows with the job how many local steps a round has from now on."""
        work = self._backend.work
        before, work.round_step_count = work.round_step_count, steps
        self._worker.note_round(steps, progress.clock)
        if before:
            logger.info(
                "worker %s takes %d local steps a round from clock %d on, %d before: "
                "a step takes %.1f ms of late, and the traffic of a push %.1f ms",
                self._backend.place.worker_id,
                steps,
                progress.clock,
                before,
                1000 * progress.compute_s,
                1000 * progress.exchange_s,
            )


def _clear_gradients(optimizer: Optimizer) -> None:
    """Has the step that follows change nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _twins_of(
    call: NamedObjects,
    anchors: Anchors,
    outers: list[Optimizer],
    inner_state: nn.Module | None,
) -> NamedObjects:
    """What the job is to train, in the place of the script's objects."""
    given = call.replaced(anchors.models)
    given = given.without(
        lambda each: not isinstance(each, nn.Module | DataLoader | LRScheduler)
    )
    names = [OUTER_NAME]
    if len(outers) > 1:
        names = [f"{OUTER_NAME}.{number}" for number in range(len(outers))]
    if taken := {*names, OUTER_NAME} & {*given.names}:
        raise ConfigurationError(
            f"{taken.pop()!r} is the name of the outer optimizer of a strategy: "
            "give prepare() the object under another name"
        )
    objects = (*given.objects, *outers)
    if inner_state is not None:
        objects, names = (*objects, inner_state), [*names, INNER_STATE_MODEL]
    return NamedObjects(objects, (*given.names, *names))


def _buffer_choice(
    twins: NamedObjects, anchors: Anchors, inner_state: nn.Module | None
) -> dict[str, str]:
    """What becomes of the buffers of all models of the job, by their names."""
    models = [each for each in twins.objects if isinstance(each, nn.Module)]
    choice = anchors.buffer_choice(has_several=len(models) > 1)
    if inner_state is not None:
        choice[f"{INNER_STATE_MODEL}.*"] = "mean"
    return choice
