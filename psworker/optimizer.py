"""The optimizer that `prepare` returns: it runs on the shards.

It is a `torch.optim.Optimizer` over the user's own parameter groups, so schedulers,
gradient scalers, clipping and step hooks work on it as on any other.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pswire.compression import NO_COMPRESSION
from pswire.optimizers import flatten_group
from pswire.reasons import Refusal
from pswire.schema import OptimizerSpec
from psworker.errors import ConfigurationError, UnsupportedError, error_of_refusal
from psworker.loss_scales import LossScales
from psworker.model_schema import BoundSchema, describe_optimizer
from psworker.optimizer_state import States, fill, states_of
from psworker.overlap.watched_parameters import WatchedParameters
from psworker.push_compression import PushCompression
from psworker.refusals import at_entrance
from psworker.sample_weight import check_weight
from psworker.saved_residuals import KEY, pack_residuals, unpack_residuals
from psworker.schedules import Schedules
from psworker.steps import Groups, PushExtras, Steps
from psworker.transport.values import OptimizerSettings
from psworker.unrounded_state import held_whole, release_whole

if TYPE_CHECKING:
    import torch

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
"""Hooks that were registered before `prepare` go on, in the same dictionaries."""


class PreparedOptimizer(Optimizer):
    """Steps on the shards and leaves the newest admissible parameters in the model.

    `step()` pushes the gradients, waits as the job's mode says, and writes what comes
    back. Optimizer state lives on the shards: `state` is empty here, and `state_dict()`
    fetches it.

    Attributes:
        name: Its name in the job.
        spec: What the shards were told of it.
    """

    # Tells `torch.amp.GradScaler` to call `step` even when it found an inf, and to
    # hand over `grad_scale` and `found_inf`: whether a clock is skipped is decided
    # for all workers at once.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: Optimizer,
        spec: OptimizerSpec,
        steps: Steps,
        bound: BoundSchema,
        compression: PushCompression | None = None,
    ) -> None:
        self._is_prepared = False
        # One group does: torch compares each with all before it, which it did when the
        # user's own were made. That list, and the groups in it, stay the user's own.
        super().__init__(inner.param_groups[:1], inner.defaults)
        self.param_groups = inner.param_groups
        for hooks in _HOOKS:
            setattr(self, hooks, getattr(inner, hooks))
        self._inner = inner
        self._steps = steps
        self._bound = bound
        self._compression = compression or PushCompression(NO_COMPRESSION, bound.schema)
        # Loaded here and not yet taken by the shards.
        self._unsent: States | None = None
        self._digest = ""  # of the first declaration
        self._is_retired = False
        self._wait: Callable[[], None] | None = None
        self._is_zeroing = False
        self._schedules = Schedules((), self)
        self._is_late = False
        self._loss_scales = LossScales()
        self.name = spec.name
        self.spec = spec
        self._is_prepared = True
        inner.state.clear()  # what it held went to the shards with the seed
        _disarm(inner)

    def __repr__(self) -> str:
        return f"PreparedOptimizer {self.name!r} of {self._inner!r}"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refused: a copy would push a second time for the same worker."""
        raise UnsupportedError(
            f"{self.name} can't be copied or pickled: it stands for one on the shards; "
            "take its state_dict()"
        )

    def step_through(self, wrap: Callable[[Steps], Steps]) -> None:
        """Lets steps go through what `wrap` makes of who has taken them so far."""
        self._steps = wrap(self._steps)

    def watch_parameters(self, wait: Callable[[], None]) -> None:
        """Has whoever looks parameters up in the groups wait for their values."""
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

    @property
    def groups(self) -> Groups:
        """Current hyperparameters of each group, as they go on the wire.

        Raises:
            HyperparameterError: A value is no number.
        """
        try:
            return tuple(
                flatten_group(self.spec.class_name, group, self.defaults)
                for group in self.param_groups
            )
        except Refusal as refusal:
            raise error_of_refusal(refusal) from None

    @_disable_dynamo  # as torch does: a script may compile all of its step
    @at_entrance
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float | None = None,
    ) -> None:
        """Pushes the gradients and leaves the newest admissible parameters.

        Args:
            closure: Not taken: shards can't call a function of this process.
            weight: Number of samples behind the gradient. By default those drawn from
                prepared loaders since the last step, or 1 where there is none.

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
        setattr(self, _STEP_WAS_CALLED, True)
        setattr(self._inner, _STEP_WAS_CALLED, True)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        before = self._schedules.steps
        result = self._steps.step(
            self.spec,
            self.groups,
            weight=weight,
            is_finite=found_inf is None or not found_inf.item(),
            scale=getattr(self, "grad_scale", None),
            extras=replace(self._extras, is_awaited=bool(self._loss_scales)),
        )
        if result is not None and found_inf is not None:
            self._loss_scales.note(self, result)
        if self._is_late and not (result and result.dropped):
            self._settle_late(before)

    def scale_with(self, loss_scales: LossScales) -> None:
        """Tells these of clocks that were skipped, also when another worker's fault."""
        self._loss_scales = loss_scales

    def follow(self, schedulers: Iterable[LRScheduler], *, is_late: bool) -> None:
        """Tells with every push where its schedulers are.

        Args:
            schedulers: All that `prepare` was given.
            is_late: Whether the job has trained already: they catch up with its.
        """
        self._schedules = Schedules(schedulers, self)
        if not (is_late and self._schedules.steps):
            return
        setattr(self, _STEP_WAS_CALLED, True)  # by the job, before this worker came
        settings = self._steps.settings_used(self.name)
        self._catch_up(self._schedules.steps, settings)
        self._is_late = True

    def _settle_late(self, before: tuple[int, ...]) -> None:
        """After the first step of a late worker: its schedulers go where others' are.

        Args:
            before: Where they were when the step was made.
        """
        self._is_late = False
        self._catch_up(before, self._steps.settings_used(self.name))

    def _catch_up(self, before: tuple[int, ...], settings: OptimizerSettings) -> None:
        self._schedules.catch_up(before, settings.scheduler_steps)
        if self._schedules.follows_metric:
            # What the job has measured is not known here: only the rates it led to.
            position = self.spec.hyperparameter_names.index("lr")
            for mine, theirs in zip(self.param_groups, settings.groups, strict=False):
                mine["lr"] = theirs[position]

    def push_nothing(self) -> None:
        """Takes part in the next clock with weight 0."""
        self._steps.push_nothing(self.spec, self.groups, self._extras)

    @at_entrance
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, here and on the shards; the state of the others stays.

        All workers of a script do so at the same place. Returns when the shards know.

        Raises:
            ConfigurationError: A parameter belongs to no model given to `prepare`.
            LimitError: Groups were added too often.
            WaitTimeoutError: The shards did not hear of it in time.
        """
        if self._is_prepared:
            self._refuse_retired("add groups to")
        super().add_param_group(param_group)
        if not self._is_prepared:
            return
        try:
            spec = describe_optimizer(
                self.name,
                self._inner,
                self._bound,
                exchange_count=self.spec.exchange_count,
            )
            self._steps.declare(spec)
        except BaseException:
            self.param_groups.pop()
            raise
        self.spec = spec
        self._digest = spec.digest
        if self._wait is not None:
            self.watch_parameters(self._wait)

    def is_of(self, inner: object) -> bool:
        """Whether this was made of that optimizer of the user's."""
        return inner is self._inner

    def take_place(self, states: States | None) -> None:
        """Begins in place of another one, perhaps with state that the user loaded."""
        self._digest = self.spec.digest
        self._unsent = states or None

    def retire(self) -> None:
        """Another one has its place: from now on its use is refused."""
        self._is_retired = True

    def _refuse_retired(self, verb: str) -> None:
        if self._is_retired:
            raise ConfigurationError(
                f"prepare() was called again and put another optimizer in place of "
                f"this {self.name}: {verb} the one that it returned"
            )

    @at_entrance
    def state_dict(self) -> dict[str, Any]:
        """State and groups, as a plain optimizer of the user's class has them.

        The state is that after this worker's last step; it is fetched from the shards.
        In SSP and ASP others go on meanwhile, so that it is not of one moment.

        Raises:
            ConfigurationError: Another optimizer is in place of this one.
            WaitTimeoutError: A shard did not answer in time.
        """
        self._refuse_retired("save")
        states = self._unsent
        if states is None:
            states = self._steps.optimizer_state(self.name, self._digest)
        try:
            fill(self, self._bound.tensors, states, class_name=self.spec.class_name)
            packed = super().state_dict()
        finally:
            self.state.clear()
        residuals = self._compression.residuals_of(self.name)
        if residuals:
            indexes = self._bound.index_of_tensors()
            packed[KEY] = pack_residuals(self.param_groups, indexes, residuals)
        return packed

    @at_entrance
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes groups and state; the state goes to the shards with the next step.

        All workers of a script load the same at the same place, as they do all else.

        Raises:
            ConfigurationError: Another optimizer is in place of this one, or the
                residuals are of other shapes, or not finite. Nothing is changed.
            ValueError: The groups are of other sizes than this optimizer's.
        """
        self._refuse_retired("load")
        indexes = self._bound.index_of_tensors()
        saved = state_dict.get(KEY, {})
        residuals = unpack_residuals(self.param_groups, indexes, saved)
        # The last of these hooks, so that it has what those of the user have made.
        unrounded = self.register_load_state_dict_pre_hook(lambda _, d: held_whole(d))
        try:
            super().load_state_dict(state_dict)
            self._unsent = states_of(self, indexes)
        finally:
            unrounded.remove()
            self.state.clear()
        self._compression.load(self.name, residuals)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes what `load_state_dict` has read, as the user's class does."""
        release_whole(state["state"])
        self._inner.__setstate__(state)
        self.state = self._inner.state
        self.param_groups = self._inner.param_groups

    @property
    def _extras(self) -> PushExtras:
        carried = self._unsent

        def note_loaded() -> None:
            if self._unsent is carried:  # else the script has loaded another since
                self._unsent = None

        return PushExtras(
            spec_digest=self._digest,
            loads=carried,
            on_loaded=note_loaded if carried is not None else None,
            scheduler_steps=self._schedules.steps,
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
