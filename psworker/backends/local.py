"""Training without a job, where no coordinator is named.

The script's own objects do the work, so that its numbers are those without psworker,
bit by bit. No thread, no network.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pswire.checkpoint.registered_state import encode_states
from psworker.backends.backend import WorkerPlace
from psworker.data.batch_tensors import watch_calls
from psworker.data.local_loader import LocalDraws, LocalLoader, local_loader
from psworker.errors import UnsupportedError, refuse_closed
from psworker.launch.torchrun import TorchrunProcess
from psworker.member.script_state import HasState, RewindCallback
from psworker.optim.buffer_policies import read_choice
from psworker.optim.checks import (
    check_clip_norm,
    check_kinds,
    check_loss,
    check_objects,
    check_same_clip_norm,
)
from psworker.optim.gradients import (
    SpentGradients,
    check_weight,
    collect_gradients,
    stored_elements,
)
from psworker.optim.named_objects import NamedObjects
from psworker.optim.optimizer_class import WRAPS
from psworker.optim.prepare import KINDS, LocalTraining, PrepareOptions
from psworker.optim.published import Published
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import RoundPush
from psworker.tensors.compression import read_compression
from psworker.tracebacks import at_entrance
from psworker.transport.ports import Traffic
from psworker.transport.values import DrawnData
from psworker.work_log import WorkLog

if TYPE_CHECKING:
    from pswire.leased_data import RecordedSplit

LOCAL_MODE: Final = "local"
LOCAL_WORKER_ID: Final = "local"

_WRAPPED_BY_SCHEDULER: Final = "_wrapped_by_lr_sched"
_STEP_WAS_CALLED: Final = "_opt_called"


class Local:
    """A process that trains alone: a `Backend`.

    Objects are checked as in a job, and returned as they are, but for loaders, which
    count what they hand out.
    """

    coordinator = ""
    title = ""
    is_leader = True
    is_out = False
    traffic = Traffic()

    def __init__(self, worker_id: str = "") -> None:
        self._worker_id = worker_id or LOCAL_WORKER_ID
        self._work = WorkLog()
        self._steps = StepCount(LOCAL_MODE)
        self._is_prepared = False
        self._loss = "mean"
        self._prepared: list[object] = []
        self._loaders: dict[int, Any] = {}  # by id() of the user's, which are kept
        self._unnamed_count = 0  # of loaders
        self._splits: dict[str, RecordedSplit] = {}

    @property
    def work(self) -> WorkLog:
        """What the script logs, which goes nowhere."""
        return self._work

    @property
    def place(self) -> WorkerPlace:
        """The only worker, from `prepare` on."""
        return WorkerPlace(
            worker_id=self._worker_id,
            mode=LOCAL_MODE,
            rank=0 if self._is_prepared else None,
            worker_count=int(self._is_prepared),
            clock=self._steps.clock,
            generation=int(self._is_prepared),
            last_push=self._steps.last_push,
        )

    @property
    def between_pushes(self) -> "StepCount":
        """What local steps need of the worker."""
        return self._steps

    def join(self, call: NamedObjects, options: PrepareOptions) -> Mapping[int, Any]:
        """Attaches itself to the optimizers, and counts what loaders hand out."""
        self._check(options)
        check_objects(call)
        for base, kind in KINDS.items():
            call.of_kind(base, kind)  # checks the names
        self._steps.clip_grad_norm = options.clip_grad_norm
        self._loss = options.loss or "mean"
        local_training = options.local_training
        if local_training is not None:
            self._steps.takes_drawn = False
            self._steps.draws.end_round = local_training.end_round
        return self._take(call, local_training)

    def exchange(
        self, call: NamedObjects, options: PrepareOptions
    ) -> Mapping[int, Any]:
        """Takes what is new: another optimizer, another model or loader too."""
        self._check(options)
        check_same_clip_norm(options.clip_grad_norm, self._steps.clip_grad_norm)
        known = list(self._loaders.values())
        fresh = call.without(
            lambda each: isinstance(each, LocalLoader) and any(each is k for k in known)
        )
        check_kinds(fresh)
        return self._take(fresh)

    def settle(self) -> None:
        """Does nothing: a step that has returned is complete."""

    def publish(self, what: Sequence[Published]) -> None:
        """Does nothing: what the script has set is what it trains with."""

    def register_state(self, name: str, holder: HasState) -> None:
        """Checks that its state could be stored; nothing is, without a job."""
        encode_states({name: holder.state_dict()})

    def on_rewind(self, callback: RewindCallback) -> None:
        """Does nothing: a process that trains alone returns to no checkpoint."""

    def record_split(self, record: "RecordedSplit") -> "RecordedSplit":
        """Keeps the first one of a name."""
        return self._splits.setdefault(record.name, record)

    def close(self, *, leaves: bool) -> None:
        """Ends it; a later `step()` is refused, as in a job."""
        self._steps.is_closed = True

    def _check(self, options: PrepareOptions) -> None:
        check_clip_norm(options.clip_grad_norm)
        if options.differential_privacy is not None:
            raise UnsupportedError(
                "differential_privacy needs a job, whose coordinator counts how often "
                "a sample takes part: name one by PS_COORDINATOR=HOST:PORT"
            )
        check_loss(options.loss, self._loss if self._is_prepared else None)
        read_compression(options.compression)
        read_choice(options.buffers)

    def _take(
        self, call: NamedObjects, local_training: LocalTraining | None = None
    ) -> Mapping[int, Any]:
        for each, name in zip(call.objects, call.names, strict=True):
            if any(each is known for known in self._prepared):
                continue  # prepared again, with another optimizer perhaps
            self._prepared.append(each)
            if isinstance(each, Optimizer):
                attach(each, self._steps)
            elif isinstance(each, DataLoader):
                own = name or f"loader{self._unnamed_count or ''}"
                self._unnamed_count += not name
                loader = local_loader(each, self._steps.draws, name=own)
                self._loaders[id(each)] = loader
        self._is_prepared = True
        if self._loaders:
            self._watch_calls(local_training)
        return self._loaders

    def _watch_calls(self, local_training: LocalTraining | None) -> None:
        """For the reports of the loaders."""
        if local_training is not None:
            self._steps.watch(
                local_training.models,
                local_training.parameters,
                optimizer_count=len(local_training.optimizers),
            )
            return
        held = [each for each in self._prepared if isinstance(each, Optimizer)]
        parameters = {
            id(each): each
            for optimizer in held
            for group in optimizer.param_groups
            for each in group["params"]
        }
        self._steps.watch(
            [each for each in self._prepared if isinstance(each, nn.Module)],
            list(parameters.values()),
            optimizer_count=len(held),
        )


class StepCount:
    """Counts the steps of all optimizers of a process: a `BetweenPushes` too.

    Attributes:
        rejoin_count: 0, since it can't be evicted.
        may_miss: Not, since it is alone.
        takes_drawn: Whether a step takes what was drawn: not where local steps do.
        is_closed: Whether further steps are refused.
        clip_grad_norm: Norm that gradients are clipped to, `None` for no clipping.
        last_push: The newest step, `None` before the first.
        draws: What was drawn from loaders; each step takes what is behind it.
    """

    rejoin_count = 0
    may_miss = False
    takes_drawn = True

    def __init__(self, mode: str) -> None:
        self.draws = LocalDraws()
        self._mode = mode
        self.is_closed = False
        self.clip_grad_norm: float | None = None
        self.last_push: PushResult | None = None
        self._grad_norm: float | None = None
        self._models: list[nn.Module] = []
        self._parameters: list[torch.Tensor] = []
        self._looked = SpentGradients(0)

    @property
    def clock(self) -> int:
        """Steps that were taken."""
        return self.last_push.clock if self.last_push else 0

    def refuse_closed(self) -> None:
        """Raises a `ClosedError` once the connection is closed."""
        refuse_closed(is_closed=self.is_closed)

    refuse_out = refuse_closed

    def place_at(self, clock: int) -> tuple[int, int]:
        """It is alone."""
        return 0, 1

    def arrive(self) -> bool:
        """Does nothing: nobody has trained before."""
        return False

    def pull(self) -> None:
        """Does nothing: there are no newer values."""

    def keep_script_state(self) -> None:
        """Does nothing: there are no checkpoints."""

    def is_void(self, optimizer: str) -> bool:
        """Never: nobody else has its data."""
        return False

    def take_drawn(self, optimizer: str) -> DrawnData:
        """The data behind a step, which counts as seen from now on."""
        return self.draws.note_step(optimizer)

    def drop(self, ranges: object) -> None:
        """Never called: no push is missed."""

    def note_wait(self, clock: int, wait_s: float) -> None:
        """Does nothing: there is no history."""

    def note_round(self, step_count: int, clock: int) -> None:
        """Does nothing: there is no job, and no history."""

    def clip(self, optimizer: Optimizer) -> None:
        """Clips the gradients of an optimizer, as a job would."""
        if self.clip_grad_norm is None:
            return
        groups = optimizer.param_groups
        held = [
            _clippable(parameter) for group in groups for parameter in group["params"]
        ]
        # A loss scaler leaves the scale in for optimizers that take it out.
        scale = getattr(optimizer, "grad_scale", None)
        factor = 1.0 if scale is None else float(scale)
        norm = clip_grad_norm_(held, self.clip_grad_norm * factor)
        self._grad_norm = float(norm) / factor

    def watch(
        self,
        models: Iterable[nn.Module],
        parameters: Sequence[torch.Tensor],
        *,
        optimizer_count: int,
    ) -> None:
        """From now on finds the data behind a step by the calls of these models.

        Args:
            models: All that are prepared.
            parameters: All that the optimizers have.
            optimizer_count: Optimizers that step, the first time that this is called.
        """
        is_first = not self._models
        fresh = [each for each in models if all(each is not m for m in self._models)]
        self._models += fresh
        self._parameters[:] = parameters
        self._looked = SpentGradients(len(parameters))
        if is_first:
            self.draws.pending.watch(
                lambda: self._looked.differ_from(self._parameters),
                parameters=self._parameters,
                optimizer_count=optimizer_count,
            )
        watch_calls(fresh, self.draws.pending)

    def note_zeroed(self) -> None:
        """Data behind gradients that were zeroed is behind no step."""
        if self.draws.pending.has_trained and not SpentGradients(
            len(self._parameters)
        ).has_others(self._parameters):
            self.draws.pending.throw_away()

    def note(self) -> None:
        """Counts one more."""
        if self.takes_drawn:
            self.draws.note_step()
        clock = self.clock + 1
        self.last_push = PushResult(
            outcome="applied",
            clock=clock,
            version=clock,
            frontier=clock,
            staleness=0,
            mode=self._mode,
            duplicate=False,
            grad_norm=self._grad_norm,
        )
        self._grad_norm = None


def _clippable(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient torch can clip: of a sparse one, its elements."""
    (gradient,) = collect_gradients([parameter])
    if gradient is None or not gradient.is_sparse:
        return parameter
    elements = stored_elements(gradient)
    holder = torch.empty_like(elements)
    holder.grad = elements
    return holder


def attach(optimizer: Optimizer, steps: StepCount) -> None:
    """Makes `optimizer.step()` take `weight=` and count in `steps`.

    The optimizer keeps its class and its arithmetic. A weight changes nothing, since
    there is no other gradient, but for 0: such a step counts for nothing.
    """
    inner: Callable[..., Any] = optimizer.step

    @at_entrance
    def step(
        self: Optimizer,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float | None = None,
        of_round: RoundPush | None = None,
        **others: Any,  # noqa: ANN401, of the user's own class
    ) -> Any:  # noqa: ANN401, what the user's own returns
        steps.refuse_closed()
        check_weight(weight)
        setattr(self, _STEP_WAS_CALLED, True)
        if of_round is not None and of_round.clock <= steps.clock:
            return None  # made before: an error has come after it
        loss = None
        if weight != 0 and closure is None:
            steps.clip(self)
            loss = inner(**others)
        elif weight != 0 and closure is not None:
            loss = inner(_clipping(self, closure, steps), **others)
        steps.note()
        return loss

    # A scheduler that was built before has wrapped the inner one, a later one wraps
    # this.
    if hasattr(inner, _WRAPPED_BY_SCHEDULER):
        setattr(step, _WRAPPED_BY_SCHEDULER, True)
    setattr(step, WRAPS, inner)  # a job may prepare it later
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    inner_zero_grad: Callable[..., None] = optimizer.zero_grad

    @_disable_dynamo  # as torch does
    def zero_grad(self: Optimizer, *args: Any, **others: Any) -> None:  # noqa: ANN401
        inner_zero_grad(*args, **others)
        steps.note_zeroed()

    setattr(zero_grad, WRAPS, inner_zero_grad)
    optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]


def _clipping(
    optimizer: Optimizer, closure: Callable[[], Any], steps: StepCount
) -> Callable[[], Any]:
    """A closure that also clips the gradients it makes."""

    def call() -> Any:  # noqa: ANN401, the loss
        loss = closure()
        steps.clip(optimizer)
        return loss

    return call


def alone_text(group: TorchrunProcess | None, count_text: str = "") -> str:
    """The warning of a script that trains without a job.

    Args:
        group: Its place in a torchrun group, if it has one.
        count_text: Which variable says that this is one of several processes.
    """
    text = (
        "no coordinator is named, so this process trains alone, as without psworker; "
        "to train as a worker of a job set PS_COORDINATOR=HOST:PORT or start the "
        "script with `psworker run --coordinator HOST:PORT -- train.py`"
    )
    if group is not None and group.process_count > 1:
        text += (
            f"; each of the {group.process_count} processes of this torchrun group "
            "does, unless the model is wrapped in DistributedDataParallel"
        )
    elif count_text:
        text += (
            f"; {count_text} is in the environment: where so many processes were "
            "started, each of them trains a model of its own"
        )
    return text
