"""Carries a strategy out: the hooks on a script's own optimizer, its pushes and takes.

Everything a job does, it does for the twins of the script's models: from below, a
worker with local steps is one that steps an outer optimizer now and then.
"""

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from pswire.activity import Activity
from pswire.membership import Mode
from pswire.schema import INNER_STATE_MODEL
from psworker.backends.backend import GROUP_STRATEGY_TEXT, Backend
from psworker.backends.local import LOCAL_MODE
from psworker.data.batch_tensors import ModelHook
from psworker.errors import (
    ConfigurationError,
    PsError,
    StepTimeoutError,
    UnsupportedError,
)
from psworker.optim.buffer_policies import warn_of_defaults
from psworker.optim.checks import check_objects, check_options_with_strategy
from psworker.optim.named_objects import NamedObjects
from psworker.optim.prepare import KINDS, PrepareOptions
from psworker.optim.published import Published
from psworker.optim.step_contents import RoundPush
from psworker.optim.wrappers import data_parallel_in
from psworker.strategies.anchors import Anchors
from psworker.strategies.inner_state import InnerStates
from psworker.strategies.pace import Timing
from psworker.strategies.rounds import (
    Progress,
    Rounds,
    fragment_drawn,
    fragment_in_turn,
)
from psworker.strategies.sender import Sender
from psworker.strategies.strategy import Strategy, Turn, check_strategy
from psworker.transport.values import DrawnData

if TYPE_CHECKING:
    from psworker.optim.push_result import PushResult

_is_compiling = torch.compiler.is_compiling

logger: Final = logging.getLogger("psworker")

_QUORUM: Final = Mode.QUORUM.label

OUTER_NAME: Final = "outer"
"""Of the outer optimizer in the job; of fragment 1 of several `outer.1`."""


_hooks: Final[WeakKeyDictionary[Optimizer | nn.Module, tuple[RemovableHandle, ...]]] = (
    WeakKeyDictionary()
)
"""On each inner optimizer, and model, those of the newest engine: they refuse steps
once it is closed, until the optimizer is prepared again."""


class Engine:
    """Trains a script's models with local steps: an `optim.prepare.LocalTraining`.

    In the script's thread. A push is made within the step of the inner optimizer that
    ends a round, or begins with it and goes on beside the steps to come, if the
    strategy takes what comes back so many steps later. Where a push raises, the next
    step makes it again first.
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
        self._mode = backend.place.mode
        if problem := _mode_problem(strategy, self._mode):
            raise UnsupportedError(problem)
        self._strategy = strategy
        self._backend = backend
        self._now = now
        models = call.of_kind("model", nn.Module)
        if any(data_parallel_in(each) for each in models.values()):
            raise UnsupportedError(GROUP_STRATEGY_TEXT)
        optimizers: dict[str, Optimizer] = call.of_kind("optimizer", KINDS["optimizer"])
        self._names = {id(each): name for name, each in optimizers.items()}
        self._anchors = Anchors(
            models,
            optimizers.values(),
            fragment_count=strategy.fragment_count,
            fragment_order=strategy.fragment_order,
            buffers=options.buffers,
        )
        self._inner = InnerStates(strategy.inner_state, tuple(optimizers.values()))
        if self._inner.model is not None and strategy.taken_after:
            raise UnsupportedError(
                'inner_state="average" would put back what steps beside the push have '
                "changed: leave it out, or take what comes back at once, taken_after=0"
            )
        self._rounds = Rounds(strategy.fragment_count, strategy.taken_after)
        self._sender = Sender()
        self._is_new = False  # no local step was taken since the worker has joined
        self._is_closed = False
        kind = type(strategy)
        self._changes_gradients = kind.before_step is not Strategy.before_step
        self._has_turns = kind.takes_part is not Strategy.takes_part
        self._takes_part = False  # in the round that is under way, as far as asked
        self._counts_samples = False
        self._samples_of_others = 0.0  # behind steps of the further optimizers
        self._token_count = 0  # noted since the last local step
        self._has_data = True  # as far as loaders have said
        self._clock = 0  # of the push under way
        self._weight = 0.0
        self._push_before: PushResult | None = None
        self._stepped_at = 0.0
        self._timing = Timing()
        self.models: Sequence[nn.Module] = tuple(models.values())
        self.parameters: Sequence[torch.Tensor] = self._anchors.tensors
        self.optimizers: Sequence[Optimizer] = tuple(optimizers.values())
        outers = [_outer_of(strategy, each.anchor) for each in self._anchors.fragments]
        twins = self._twins_of(call, outers)
        replaced = backend.join(
            twins,
            replace(options, local_training=self, buffers=self._buffer_choice(twins)),
        )
        if options.buffers is None and backend.place.rank == 0:  # once in a job
            warn_of_defaults(self._anchors.policies)
        self._loaders = {
            id(each): replaced[id(each)]
            for each in call.objects
            if id(each) in replaced
        }
        self._worker = backend.between_pushes
        self._outers: list[Any] = [replaced.get(id(each), each) for each in outers]
        self.start_over()
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Is called at each step from now on, and before models compute."""
        for position, optimizer in enumerate(self.optimizers):
            after = partial(self._after_step, is_first=not position)
            _replace_hooks(
                optimizer,
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(after),
            )
        for model in self.models:
            before = model.register_forward_pre_hook(_BeforeForward(self))
            _replace_hooks(model, before)

    @property
    def replaced(self) -> Mapping[int, Any]:
        """What `prepare` returns in the place of an object, by its `id()`."""
        return self._loaders

    def _twins_of(self, call: NamedObjects, outers: list[Optimizer]) -> NamedObjects:
        """What the job is to train, in the place of the script's objects."""
        given = call.replaced(self._anchors.models)
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
        if self._inner.model is not None:
            objects, names = (*objects, self._inner.model), [*names, INNER_STATE_MODEL]
        return NamedObjects(objects, (*given.names, *names))

    def _buffer_choice(self, twins: NamedObjects) -> dict[str, str]:
        """What becomes of the buffers of all models of the job, by their names."""
        models = [each for each in twins.objects if isinstance(each, nn.Module)]
        choice = self._anchors.buffer_choice(has_several=len(models) > 1)
        if self._inner.model is not None:
            choice[f"{INNER_STATE_MODEL}.*"] = "mean"
        return choice

    # What the backend calls: an `optim.prepare.LocalTraining`

    def start_over(self) -> None:
        """The worker has joined, or joined anew: it goes on from the job's values."""
        self._sender.drop()
        self._rejoin_count = self._worker.rejoin_count
        self._rounds.start_over()
        self._samples_of_others = 0.0
        self._is_new = True
        self._takes_part = False
        self._anchors.start_over()

    def end_round(self) -> None:
        """There is no more data for now: pushes what was trained, whoever waits."""
        self._has_data = False
        self._finish_push()
        while not self._rounds.is_clean:
            self._push(is_beside=False)
        self._show()

    def contribute(self, push_nothing: Callable[[], None]) -> None:
        """The job waits for a push of this worker, which has no data.

        Args:
            push_nothing: Makes one of weight 0.
        """
        self._finish_push()
        if not self._rounds.is_clean:
            self._push(is_beside=False)
            return
        self._takes_part = False
        fragment = self._next_fragment()
        if self._worker.may_miss:
            self._anchors.keep()
        push_nothing()
        if not self._rejoined():
            self._follow(fragment, self._backend.place.last_push)
            self._take(fragment)

    def before_draw(self) -> None:
        """The script asks for a batch: waits for a round that is this worker's."""
        if not self._has_turns or self._takes_part:
            return
        self._begin()
        while self._rounds.is_clean and not self._strategy.takes_part(self._turn()):
            self.contribute(self._outers[self._next_fragment()].push_nothing)
            self._begin()
        # Asked once: who joins or is lost within a round changes nothing about it.
        self._takes_part = True

    def publish(self, what: Sequence[Published]) -> None:
        """Makes values that the script has set those of the job, and of the anchor.

        Raises:
            ConfigurationError: A tensor belongs to no prepared model.
        """
        self._finish_push()
        self._backend.publish(self._anchors.published(what))
        self._rejoined()

    def note_tokens(self, token_count: int) -> None:
        """The next local step is of so many tokens more."""
        self._token_count += token_count

    def close(self) -> None:
        """Pushes what was trained and not pushed: the script is done."""
        if self._is_closed or self._backend.is_out:
            return
        self._is_closed = True
        try:
            self.end_round()
        except PsError as error:
            # The script is done, and an error now would hide that.
            logger.warning(
                "the last %d local steps of worker %s could not be pushed, and count "
                "for nothing; their data goes to the other workers: %s",
                self._rounds.unsent_step_count,
                self._backend.place.worker_id,
                error,
            )

    def end(self) -> None:
        """Nothing is pushed any more."""
        self._is_closed = True
        self._sender.close()

    @property
    def is_sending(self) -> bool:
        """Whether a push is under way beside the script."""
        return self._sender.is_open

    # The hooks of the inner optimizers

    def _begin(self) -> None:
        """Takes the newest values, before all else that the script does."""
        if self._is_new:
            if self._worker.arrive() and not self._rejoined():
                self.start_over()
            self._is_new = False

    def before_forward(self, model: nn.Module) -> None:
        """A model is called to train: with the newest values, in a round of its own."""
        is_ready = not self._is_new and (self._takes_part or not self._has_turns)
        if is_ready or self._is_closed or not model.training:
            return
        if torch.is_grad_enabled():
            self._worker.refuse_out()
            self._go_on()
            self._begin()
            self.before_draw()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._has_data = True
        self._worker.refuse_out()
        self._go_on()
        change = self._change_gradients
        if self._worker.is_void(self._names[id(optimizer)]):
            change = partial(_clear_gradients, optimizer)
        else:
            self._begin()
            self.before_draw()
            if not self._changes_gradients:
                return None
        own, *given = args  # the optimizer, and what its step was called with
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            change()
            return None
        followed = _followed(closure, change)
        if given:
            return (own, followed, *given[1:]), kwargs
        return args, {**kwargs, "closure": followed}

    def _change_gradients(self) -> None:
        with torch.no_grad():
            for fragment in self._anchors.fragments:
                self._strategy.before_step(fragment.local, fragment.anchor)

    def _after_step(
        self, optimizer: Optimizer, args: object, kwargs: object, *, is_first: bool
    ) -> None:
        drawn = self._worker.take_drawn(self._names[id(optimizer)])
        if drawn.is_of_lost or self._is_new:
            self._token_count = 0
            return
        self._counts_samples |= drawn.sample_count is not None
        sample_count = drawn.sample_count or 0.0
        if not is_first:
            self._samples_of_others += sample_count
            self._rounds.hold(drawn.ranges)
            return
        if not self._counts_samples:
            sample_count = 1.0
        before, self._stepped_at = self._stepped_at, self._now()
        if before:
            self._timing.note_step(self._stepped_at - before)
        self._rounds.note_step(
            sample_count + self._samples_of_others,
            drawn.ranges,
            token_count=self._token_count,
        )
        self._samples_of_others = 0.0
        self._token_count = 0
        if self._sender.is_answered:
            self._go_on()
        if self._rounds.is_ripe and not (self._sender.is_open and self._never_waits):
            self._finish_push()
        if self._rounds.sent is None and self._is_due():
            self._push(is_beside=self._strategy.taken_after > 0)
        self._show()

    def _show(self) -> None:
        """Shows with the job where the worker stands."""
        work = self._backend.work
        sent = self._rounds.sent if self._sender.is_open else None
        work.steps_since_push = self._rounds.steps_since_push
        work.fragment_under_way = sent.fragment + 1 if sent is not None else 0

    def _is_due(self) -> bool:
        """Whether a push is due; shows how long the round is, where that is new."""
        progress = self._progress()
        is_due = self._strategy.is_due(progress)
        steps = self._strategy.round_step_count or 0
        if steps != self._backend.work.round_step_count:
            self._show_round(steps, progress)
        return is_due or (self._rounds.was_missed and progress.step_count > 0)

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

    # Pushes

    @property
    def _never_waits(self) -> bool:
        """Whether a local step goes on without an answer that is not there yet."""
        return self._strategy.taken_after > 0 and self._backend.place.mode == _QUORUM

    @property
    def _slack_ms(self) -> int:
        """How long local steps go on before they would take what is pushed now."""
        return round(1000 * self._strategy.taken_after * self._timing.compute_s)

    def _turn(self) -> Turn:
        clock = self._backend.place.clock + 1
        return Turn(clock, *self._worker.place_at(clock))

    def _progress(self) -> Progress:
        rounds, place = self._rounds, self._backend.place
        fragment = self._next_fragment()
        return Progress(
            fragment=fragment,
            work=rounds.work_behind(fragment),
            steps_since_push=rounds.steps_since_push,
            total_step_count=rounds.total_step_count,
            push_count=rounds.push_count,
            clock=place.clock + 1,
            rank=place.rank or 0,
            worker_count=self._worker.place_at(place.clock + 1)[1],
            compute_s=self._timing.compute_s,
            exchange_s=self._timing.exchange_s,
        )

    def _next_fragment(self) -> int:
        clock, count = self._backend.place.clock + 1, len(self._anchors.fragments)
        if self._strategy.fragments_are_drawn:
            return fragment_drawn(clock, count)
        return fragment_in_turn(clock, count)

    def _push(self, *, is_beside: bool) -> None:
        """Pushes the next fragment, and takes what comes back.

        Args:
            is_beside: Whether it only begins: the script goes on meanwhile.
        """
        self._anchors.look()
        if new := self._anchors.take_up():
            self._outers[-1].add_param_group({"params": new})
        progress = self._progress()
        self._look_at_mode(progress.clock)
        fragment = self._anchors.fragments[progress.fragment]
        if self._strategy.pulls_first:
            self._worker.pull()
            if self._rejoined():
                return
        with torch.no_grad():
            pushed = self._strategy.push(fragment.anchor, fragment.local, progress)
            self._inner.send()
        fragment.set_gradients(pushed)
        self._anchors.send_followed()
        if self._worker.may_miss:
            self._anchors.keep()
        self._clock = progress.clock
        self._push_before = self._backend.place.last_push
        self._weight = float(self._strategy.weight(progress))
        self._rounds.begin(progress.fragment)
        self._send(is_beside=is_beside)
        if not is_beside:
            self._finish_push()

    def _look_at_mode(self, clock: int) -> None:
        """Warns where the job was changed to a mode that the strategy is not for."""
        before, self._mode = self._mode, self._backend.place.mode
        problem = _mode_problem(self._strategy, self._mode)
        if problem and before != self._mode:
            logger.warning("from clock %d on, training goes on so: %s", clock, problem)

    def _send(self, *, is_beside: bool) -> None:
        """Makes the push that was begun, perhaps again after an error."""
        sent = self._rounds.sent
        assert sent is not None, "it was begun"
        of_round = RoundPush(
            drawn=DrawnData(round(sent.new_work.sample_count), sent.ranges),
            clock=self._clock,
            rejoin_count=self._rejoin_count,
            is_beside=is_beside,
            slack_ms=self._slack_ms if is_beside else None,
        )
        outer, weight = self._outers[sent.fragment], self._weight

        def push() -> None:
            begun_at = self._now()
            outer.step(weight=weight, of_round=of_round)
            self._timing.push_s = self._now() - begun_at

        if is_beside:
            self._worker.keep_script_state()
            self._sender.send(push, self._anchors.devices)
        else:
            self._wait_for(push)
            self._settle()

    def _go_on(self) -> None:
        """Looks at what is under way, without waiting for it.

        Raises:
            PsError: As the push raised that is under way.
        """
        if self._sender.is_answered:
            try:
                self._sender.finish()
            except StepTimeoutError as error:
                if not self._never_waits:
                    raise
                logger.warning("%s; the local steps go on meanwhile", error)
                self._send(is_beside=True)
            else:
                self._settle()
        elif not self._sender.is_open:
            is_open = not (self._strategy.taken_after and self._rounds.is_settled)
            if self._rounds.sent is not None and is_open:
                self._finish_push()  # an error has ended it, or what came after it
            self._rejoined()

    def _finish_push(self) -> None:
        """Returns once a push that is under way is done, and what it brings is taken.

        One that an error has ended is made again.
        """
        rounds = self._rounds
        if self._sender.is_open:
            before = self._backend.work.enter(Activity.WAITING)
            try:
                self._wait_for(self._sender.finish)
            finally:
                self._backend.work.enter(before)
            self._settle()
        elif rounds.sent is not None and not rounds.is_settled:
            self._send(is_beside=False)
        if rounds.is_settled:
            self._take(rounds.take())

    def _wait_for(self, push: Callable[[], None]) -> None:
        """Returns once the job has answered a push; notes how long the script waits."""
        begun_at = self._now()
        try:
            push()
        finally:
            self._stepped_at = self._now()
            if self._has_data:
                self._worker.note_wait(self._clock, self._stepped_at - begun_at)

    def _settle(self) -> None:
        """The job has answered the push: what has become of it."""
        sent = self._rounds.sent
        if sent is None or self._rejoined():
            return  # a handler that has called `ps.close()` meanwhile has seen to it
        self._takes_part = False
        result = self._backend.place.last_push
        has_counted = False
        if result is not None and result is not self._push_before:  # it was pushed
            has_counted = not result.missed
            self._timing.note_push(result.peer_wait_s)
            self._follow(sent.fragment, result)
        if has_counted:  # else a strategy may go on with what is in them
            self._anchors.fragments[sent.fragment].clear_gradients()
        self._rounds.settle(has_counted=has_counted)

    def _follow(self, fragment: int, result: "PushResult | None") -> None:
        """Takes up what the job did in a clock that has closed without this worker.

        All of the anchor is new then. Of the fragment of a push that is of no use later
        the worker takes the job's values; the others move as the anchor has moved.
        """
        if result is None:
            return
        if result.dropped:
            self._anchors.forget(fragment)
        if result.dropped or result.missed:
            self._anchors.follow_job()

    def _take(self, fragment: int) -> None:
        taken = self._anchors.fragments[fragment]
        self._anchors.forget(fragment)
        with torch.no_grad():
            self._strategy.take(taken.local, taken.anchor)
            self._inner.take(taken.local)
        self._anchors.take_followed()

    def _rejoined(self) -> bool:
        """Whether the worker has joined anew, and begins again from the anchor."""
        count = self._worker.rejoin_count
        if count == self._rejoin_count:
            return False
        self._rejoin_count = count
        self.start_over()
        return True


class _BeforeForward(ModelHook):
    """A forward pre-hook, of a model that must not keep the engine alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, model: nn.Module, _: object) -> None:
        """A model is called."""
        if _is_compiling():
            return
        if (engine := self._engine()) is not None:
            engine.before_forward(model)


def _replace_hooks(of: Optimizer | nn.Module, *handles: RemovableHandle) -> None:
    """Removes those of a connection before."""
    for handle in _hooks.pop(of, ()):
        handle.remove()
    _hooks[of] = handles


def _clear_gradients(optimizer: Optimizer) -> None:
    """Has the step that follows change nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _followed(
    closure: Callable[[], Any], change: Callable[[], None]
) -> Callable[[], Any]:
    """A closure whose gradients are changed once it has computed them."""

    @wraps(closure)
    def followed() -> Any:  # noqa: ANN401, as the script's
        loss = closure()
        change()
        return loss

    return followed


def _outer_of(strategy: Strategy, parameters: list[torch.Tensor]) -> Optimizer:
    """The outer optimizer of a fragment.

    Raises:
        ConfigurationError: It is none, or of other parameters.
    """
    outer = strategy.outer(parameters)
    groups = outer.param_groups if isinstance(outer, Optimizer) else []
    held = {id(each) for group in groups for each in group["params"]}
    if held != {id(each) for each in parameters}:
        raise ConfigurationError(
            f"the outer optimizer of {type(strategy).__name__} is a "
            f"{type(outer).__name__} of {len(held)} parameters, and there are "
            f"{len(parameters)}: have outer(parameters) return one of all that it is "
            "given, such as torch.optim.SGD(parameters, lr=0.7)"
        )
    return outer


def _mode_problem(strategy: Strategy, mode: str) -> str:
    """Why a strategy does not work in a mode, and what to do; empty if it does."""
    if mode in (*strategy.modes, LOCAL_MODE, ""):
        return ""
    first, wanted = strategy.modes[0], " or ".join(strategy.modes)
    return (
        f"{type(strategy).__name__} works in a job in mode {wanted}, and this one is "
        f"in {mode}: start it with --mode {first}, or change it with psctl mode {first}"
    )
