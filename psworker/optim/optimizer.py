"""The optimizer that `prepare` returns: it runs on the shards.

It is a `torch.optim.Optimizer` over the user's own parameter groups, so schedulers,
gradient scalers, clipping and step hooks work on it as on any other.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn, Protocol

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pswire.compression import NO_COMPRESSION
from pswire.optimizers import SUPPORTED, check_values, flatten_group
from pswire.reasons import Refusal
from pswire.schema import OptimizerSpec, ParameterGroup
from psworker.errors import ConfigurationError, UnsupportedError, error_of_refusal
from psworker.left_behind import reduced
from psworker.optim.adjusters import LossScales, Schedules, set_hyperparameter
from psworker.optim.fetched_state import FetchedState, WatchedParameters
from psworker.optim.gradients import check_weight
from psworker.optim.model_schema import (
    BoundSchema,
    describe_groups,
    parameters_of,
    refuse_differentiable,
)
from psworker.optim.optimizer_state import (
    RESIDUALS_KEY,
    States,
    by_parameter,
    edited_states,
    held_whole,
    pack_residuals,
    release_whole,
    states_of,
    unpack_residuals,
)
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import (
    Groups,
    OptimizerStep,
    RoundPush,
    StateLoad,
)
from psworker.optim.user_calls import UserCalls, in_turn
from psworker.tensors.push_compression import PushCompression
from psworker.tracebacks import at_entrance
from psworker.transport.values import OptimizerSettings

_WRAPPED_BY_SCHEDULER: Final = "_wrapped_by_lr_sched"
_STEP_WAS_CALLED: Final = "_opt_called"
_HOOKS: Final = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Hooks that were registered before `prepare` stay, in the same dictionaries."""


class Steps(Protocol):
    """Takes the steps of all optimizers of a process, as `Stepper` does."""

    @property
    def reads_state(self) -> bool:
        """Whether this process can ask shards for optimizer state."""
        ...

    def step(self, wanted: OptimizerStep) -> PushResult | None:
        """Pushes the gradient of one optimizer and leaves the newest values.

        Returns:
            What became of it, `None` while that is left under way.
        """
        ...

    def push_nothing(self, wanted: OptimizerStep) -> PushResult:
        """Pushes weight 0 for the next clock."""
        ...

    def note_zeroed(self) -> None:
        """The script has zeroed gradients, perhaps some that no step has taken."""
        ...

    def optimizer_state(self, optimizer: str, spec_digest: str) -> States:
        """The state of an optimizer after all that this worker has pushed."""
        ...

    def settings_used(self, optimizer: str) -> OptimizerSettings:
        """What the newest update of an optimizer was made with."""
        ...

    def declare(self, spec: OptimizerSpec) -> None:
        """Declares an optimizer with other groups, or in another's place, to shards."""
        ...


class PreparedOptimizer(Optimizer):
    """Steps on the shards and leaves the newest admissible parameters in the model.

    `step()` pushes the gradients, waits as the job's mode says, and writes the values
    of the answer. Optimizer state lives on the shards: `state` and `state_dict()` fetch
    it. What the script does to `param_groups` and `state` between two steps is sent
    with the next push, or declared before it.

    Attributes:
        loss_scales: Lowered after a skipped clock, also for another worker's gradient.
        schedules: Its schedulers.
        before_step: Called when a step begins, as code of the script.
        name: Its name in the job.
        spec: As it was declared last.
    """

    # Has `torch.amp.GradScaler` call `step` even when it found an inf, and set
    # `grad_scale` and `found_inf`: whether a clock is skipped is decided for all
    # workers at once.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: Optimizer,
        spec: OptimizerSpec,
        steps: Steps,
        bound: BoundSchema,
        compression: PushCompression | None = None,
        calls: UserCalls | None = None,
    ) -> None:
        self._is_prepared = False
        self._calls = UserCalls()  # its own, until it is made
        self._bound = bound
        self._indexes = bound.index_of_tensors()
        self._shown: defaultdict[torch.Tensor, Any] | None = None
        self._state = FetchedState(self._read_state, self._name_of)
        # One group does: torch compares each with all before it, which it did when the
        # user's own were made. That list, and the groups in it, stay the user's own.
        super().__init__(inner.param_groups[:1], inner.defaults)
        self._state.forget()
        self.param_groups = inner.param_groups
        for hooks in _HOOKS:
            setattr(self, hooks, getattr(inner, hooks))
        self._inner = inner
        self._steps = steps
        self._compression = compression or PushCompression(NO_COMPRESSION, bound.schema)
        # Loaded here and not yet taken by the shards.
        self._unsent: States | None = None
        self._digest = ""  # of the first declaration
        self._is_retired = False
        self._wait: Callable[[], None] | None = None
        self._is_zeroing = False
        self.schedules = Schedules((), inner)
        self.before_step: Callable[[], None] = lambda: None
        self._is_late = False
        self.loss_scales = LossScales()
        self.name = spec.name
        # Of every parameter that it has had what its state was made for.
        self._switches: dict[int, tuple[bool, ...]] = {}
        self._checked: Groups = ()  # the newest that are allowed
        self._note_declared(spec)
        self._is_prepared = True
        self._calls = calls or self._calls
        inner.state.clear()  # which was sent with the seed
        _disarm(inner)

    def __repr__(self) -> str:
        return f"PreparedOptimizer {self.name!r} of {self._inner!r}"

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Refused: a copy would push a second time for the same worker."""
        return reduced(
            self.name, "it stands for one on the shards; take its state_dict()"
        )

    def step_through(self, wrap: Callable[[Steps], Steps]) -> None:
        """Takes steps by what `wrap` makes of what has taken them so far."""
        self._steps = wrap(self._steps)

    def watch_parameters(self, wait: Callable[[], None]) -> None:
        """Waits whenever parameters are looked up in the groups."""
        self._wait = wait
        for group in self.param_groups:
            group["params"] = WatchedParameters(group["params"], self._about_to_read)

    def _about_to_read(self) -> None:
        if self._wait is not None and not self._is_zeroing:
            self._wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. It reads no values, so that it does not wait for any."""
        self._is_zeroing = True
        try:
            super().zero_grad(set_to_none)
        finally:
            self._is_zeroing = False
        self._steps.note_zeroed()

    @property
    def groups(self) -> Groups:
        """Current hyperparameters of each group, as they are sent.

        Raises:
            HyperparameterError: A value is no number, or not allowed.
        """
        try:
            groups = tuple(
                flatten_group(self.spec.class_name, group, self.defaults)
                for group in self.param_groups
            )
            if groups != self._checked:
                for declared, values in zip(self.spec.groups, groups, strict=True):
                    check_values(
                        self.spec.class_name,
                        self.spec.hyperparameter_names,
                        values,
                        declared=declared.hyperparameters,
                    )
                self._checked = groups
        except Refusal as refusal:
            raise error_of_refusal(refusal) from None
        return groups

    @_disable_dynamo  # as torch does: a script may compile all of its step
    @at_entrance
    @in_turn("optimizer.step()")
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float | None = None,
        of_round: RoundPush | None = None,
    ) -> None:
        """Pushes the gradients and leaves the newest admissible parameters.

        Args:
            closure: Not taken: shards can't call a function of this process.
            weight: Number of samples behind the gradient. By default those drawn from
                prepared loaders since the last step, or 1 where there is none.
            of_round: Of a strategy: what ends a round of local steps with it.

        Raises:
            StepTimeoutError: Some worker or shard did not come in time.
            JobFailedError: The job can't go on.
            EvictedError: The job goes on without this worker.
        """
        if closure is not None:
            raise UnsupportedError(
                "step(closure) is not possible: the optimizer runs on the shards, "
                "which can't compute the loss again; call backward() first, then step()"
            )
        self._refuse_retired("step")
        check_weight(weight)
        self._calls.lent(self.before_step)
        self.schedules.end_wait()
        self._follow_script()
        setattr(self, _STEP_WAS_CALLED, True)
        setattr(self._inner, _STEP_WAS_CALLED, True)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        before = self.schedules.steps
        wanted = replace(
            self._wanted,
            weight=weight,
            is_finite=found_inf is None or not found_inf.item(),
            scale=getattr(self, "grad_scale", None),
            is_awaited=bool(self.loss_scales),
            of_round=of_round,
        )
        result = self._steps.step(wanted)
        if result is not None and found_inf is not None:
            self.loss_scales.note(self, result)
        if self._is_late and not (result and result.dropped):
            self._is_late = False
            settings = self._steps.settings_used(self.name)
            self._catch_up(before, settings.scheduler_steps, settings)

    def follow(
        self,
        schedulers: Iterable[LRScheduler],
        *,
        is_late: bool,
        new_epoch: int = 0,
        local: Sequence[Optimizer] = (),
    ) -> None:
        """Sends with every push how many steps its schedulers have taken.

        Those of a job that has trained already (`is_late`) are caught up with.

        Args:
            schedulers: All that `prepare` was given.
            is_late: Whether the job has trained already.
            new_epoch: The one that it comes to next; 0 if it is in the middle of one.
            local: Optimizers that step between pushes of this one, and have the
                schedulers.
        """
        self.schedules = Schedules(schedulers, *(local or (self,)))
        if not (is_late and self.schedules.steps):
            return
        for each in (self, *local):  # by the job, before this worker joined
            setattr(each, _STEP_WAS_CALLED, True)
        before = self.schedules.steps
        taken = self._catch_up_with_job(before)
        self.schedules.await_script(before, taken, new_epoch)
        self._is_late = True

    def rewind(self, *, is_late: bool) -> None:
        """Sets schedulers and rates back: the job has returned to a checkpoint.

        Args:
            is_late: Whether the job has trained as of the checkpoint.
        """
        self.schedules.begin_again()
        self._is_late = is_late and bool(self.schedules.steps)
        if is_late:
            self._catch_up_with_job(self.schedules.steps)

    def _catch_up_with_job(self, before: tuple[int, ...]) -> tuple[int, ...]:
        """Has schedulers take the steps that the job's will have at its next push.

        This worker's own next push may be the one whose settings count.

        Returns:
            How many these are.
        """
        settings = self._steps.settings_used(self.name)
        self._catch_up(before, settings.next_scheduler_steps, settings)
        return settings.next_scheduler_steps

    def _catch_up(
        self,
        before: tuple[int, ...],
        wanted: tuple[int, ...],
        settings: OptimizerSettings,
    ) -> None:
        """Has schedulers that were at `before` take the steps that others' have."""
        self.schedules.catch_up(before, wanted)
        if self.schedules.follows_metric or not before:
            # What has set the rates is not known here: only what they were.
            position = self.spec.hyperparameter_names.index("lr")
            for mine, theirs in zip(self.param_groups, settings.groups, strict=False):
                set_hyperparameter(mine, "lr", theirs[position])

    @in_turn("next(loader)")
    def push_nothing(self) -> None:
        """Takes part in the next clock with weight 0."""
        self._steps.push_nothing(self.next_step())

    def next_step(self) -> OptimizerStep:
        """What goes with the next push, as the script has it now."""
        self._follow_script()
        return self._wanted

    @at_entrance
    @in_turn("optimizer.add_param_group()")
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, here and on the shards; the state of the others stays.

        All workers of a script do so at the same place. Returns once it is declared.

        Raises:
            ConfigurationError: A parameter belongs to no model given to `prepare`.
            LimitError: Groups were added too often.
            WaitTimeoutError: The shards did not answer in time.
        """
        if self._is_prepared:
            self._refuse_retired("add groups to")
        # Torch looks the parameters up, which waits for their values.
        self._calls.lent(partial(super().add_param_group, param_group))
        if not self._is_prepared:
            return
        try:
            self._declare()
        except BaseException:
            self.param_groups.pop()
            raise

    def is_of(self, inner: object) -> bool:
        """Whether this was made of that optimizer of the user's."""
        return inner is self._inner

    def take_place_of(self, other: "PreparedOptimizer", states: States) -> None:
        """Begins in place of another one, which is refused; `states` were loaded."""
        self._digest = self.spec.digest
        self._unsent = states or None
        other._is_retired = True

    def _refuse_retired(self, verb: str) -> None:
        if self._is_retired:
            raise ConfigurationError(
                f"prepare() was called again and put another optimizer in place of "
                f"this {self.name}: {verb} the one that it returned"
            )

    @at_entrance
    @in_turn("optimizer.state_dict()")
    def state_dict(self) -> dict[str, Any]:
        """State and groups, as a plain optimizer of the user's class has them.

        The state is that after this worker's last step; it is fetched from the shards.
        In SSP and ASP others go on meanwhile, so that it is not of one moment.

        Raises:
            ConfigurationError: Another optimizer is in place of this one.
            WaitTimeoutError: A shard did not answer in time.
        """
        self._refuse_retired("save")
        self._take_edits()
        fetched = self._fetched_state()  # first: it settles a step that is under way
        held = {id(each) for group in self.param_groups for each in group["params"]}
        # torch has no number for a parameter that its group has lost.
        shown = {p: own for p, own in fetched.items() if id(p) in held}
        self._shown = defaultdict(dict, {**shown, **self._state.own()})
        try:
            packed = super().state_dict()
        finally:
            self._shown = None
        residuals = self._compression.residuals_of(self.name)
        if residuals:
            packed[RESIDUALS_KEY] = pack_residuals(
                self.param_groups, self._indexes, residuals
            )
        return packed

    @at_entrance
    @in_turn("optimizer.load_state_dict()")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes groups and state; the state goes to the shards with the next step.

        All workers of a script load the same at the same place, as they do all else.

        Raises:
            ConfigurationError: Another optimizer is in place of this one, or the
                residuals are of other shapes, or not finite. Nothing is changed.
            ValueError: The groups are of other sizes than this optimizer's.
        """
        self._refuse_retired("load")
        saved = state_dict.get(RESIDUALS_KEY, {})
        residuals = unpack_residuals(self.param_groups, self._indexes, saved)
        # The last of these hooks, so that it has what those of the user have made.
        unrounded = self.register_load_state_dict_pre_hook(lambda _, d: held_whole(d))
        try:
            self._calls.lent(partial(super().load_state_dict, state_dict))
            self._unsent = states_of(self, self._indexes)
            self._state.clear()
            self._state.forget()
            self._state.take_own(self.state)
        finally:
            unrounded.remove()
            self._shown = None
            self._inner.state.clear()
        self._compression.load(self.name, residuals)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes what `load_state_dict` has read, as the user's class does."""
        release_whole(state["state"])
        self._inner.__setstate__(state)
        self._shown = self._inner.state
        self._groups = self.param_groups = self._inner.param_groups

    # What the script does to groups and state

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State by parameter, fetched from the shards when it is looked into."""
        return self._state if self._shown is None else self._shown

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._state.clear()
        self._state.update(state)

    def _name_of(self, key: object) -> str | None:
        index = self._indexes.get(id(key))
        return None if index is None else self._bound.schema.entries[index].name

    @in_turn("optimizer.state")
    def _read_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        return self._fetched_state()

    def _fetched_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        self._refuse_retired("read the state of")
        states = self._unsent
        if states is None:
            states = self._steps.optimizer_state(self.name, self._digest)
        class_name = self.spec.class_name
        return by_parameter(self._bound.tensors, states, class_name=class_name)

    def _follow_script(self) -> None:
        """Takes up what the script has changed since the last step.

        Raises:
            ConfigurationError: It can't be followed. Nothing was sent or is lost.
        """
        self._follow_groups()
        if not self._state.is_untouched:
            self._take_edits()
            self._state.forget()

    def _take_edits(self) -> None:
        """Sends the state with the next push, if the script has edited it."""
        stateful = [self._bound.tensors[index] for index in self._switches]
        look = partial(self._state.edits, stateful, is_readable=self._steps.reads_state)
        edited = self._calls.lent(look)  # it may fetch, as the script does
        if edited is None:
            return
        try:
            self._unsent = edited_states(edited, self._indexes)
        except ValueError as error:
            index, problem = error.args
            entry = self._bound.schema.entries[index]
            raise ConfigurationError(
                f"optimizer.state of {entry.name!r} of {entry.model} {problem}: the "
                f"state of {self.name} is on the shards, which keep that of "
                f"{self.spec.class_name} alone; keep what is the script's own in a "
                "dict of its own, and take it out here"
            ) from None
        self._state.note_taken()

    def _follow_groups(self) -> None:
        groups = self.param_groups
        if groups is not self._groups and self._inner.param_groups is self._groups:
            self._inner.param_groups = groups
        if groups is not self._inner.param_groups:
            raise ConfigurationError(
                f"the script has given another param_groups to the optimizer that "
                f"prepare() was given, which steps no more: give it to the {self.name} "
                "that prepare() returned"
            )
        try:
            if self._identities_of(groups) != self._identities:
                self._declare()
        except ConfigurationError as error:
            raise ConfigurationError(
                f"param_groups of {self.name} have changed since the last step, and "
                f"can't be followed: {error}"
            ) from error.__cause__
        refuse_differentiable(self)

    def _declare(self) -> None:
        """Declares the groups as they are now."""
        spec = self.spec
        groups = describe_groups(spec.name, spec.class_name, self, self._bound)
        self._refuse_switched(groups)
        before = [frozenset(group.entry_indexes) for group in spec.groups]
        if before != [frozenset(group.entry_indexes) for group in groups]:
            spec = replace(spec, groups=groups)
            self._steps.declare(spec)
            self._digest = spec.digest
        self._note_declared(spec)
        if self._wait is not None:
            self.watch_parameters(self._wait)

    def _note_declared(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self._checked = ()
        for group in spec.groups:
            for index in group.entry_indexes:
                self._switches[index] = self._switches_of(group)
        self._groups = self.param_groups
        self._identities = self._identities_of(self.param_groups)

    def _identities_of(self, groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        return [
            list(map(id, parameters_of(group, self.name, position)))
            for position, group in enumerate(groups)
        ]

    def _switches_of(self, group: ParameterGroup) -> tuple[bool, ...]:
        """What decides which state torch makes at the first step of a parameter."""
        traits = SUPPORTED[self.spec.class_name].hyperparameters
        return tuple(
            bool(value)
            for each, value in zip(traits, group.hyperparameters, strict=True)
            if each.fixed_bool
        )

    def _refuse_switched(self, groups: Sequence[ParameterGroup]) -> None:
        """Refuses a parameter in a group for which torch would make other state."""
        for position, group in enumerate(groups):
            wanted = self._switches_of(group)
            for index in group.entry_indexes:
                if self._switches.get(index, wanted) == wanted:
                    continue
                names = " and ".join(
                    each.name
                    for each in SUPPORTED[self.spec.class_name].hyperparameters
                    if each.fixed_bool
                )
                entry = self._bound.schema.entries[index]
                raise ConfigurationError(
                    f"group {position} has another {names} than the one in which "
                    f"{entry.name!r} of {entry.model} has trained, and torch makes the "
                    "state for it at the first step only: give both groups the same"
                )

    @property
    def _wanted(self) -> OptimizerStep:
        carried = self._unsent

        def note_loaded() -> None:
            if self._unsent is carried:  # else the script has loaded another since
                self._unsent = None

        return OptimizerStep(
            spec=self.spec,
            groups=self.groups,
            spec_digest=self._digest,
            load=None if carried is None else StateLoad(carried, note_loaded),
            scheduler_steps=self.schedules.steps,
        )


# A scheduler wraps the `step` of the optimizer it is built with, to warn when it is
# never called. Marked so, `step` is left alone, also by a scheduler that was built
# before `prepare`; it notes by itself that it was called.
setattr(PreparedOptimizer.step, _WRAPPED_BY_SCHEDULER, True)


def _disarm(inner: Optimizer) -> None:
    """Makes a step of the user's old optimizer an error instead of a lost update."""

    def step(*_: object, **__: object) -> NoReturn:
        raise ConfigurationError(
            "this optimizer was given to prepare(): step the one that prepare() "
            "returned, as in `model, optimizer = ps.prepare(model, optimizer)`"
        )

    setattr(step, _WRAPPED_BY_SCHEDULER, True)
    inner.step = step  # type: ignore[method-assign]
