"""Training without a job: what `connect()` returns where no coordinator is named.

The script's own objects do the work, so that its numbers are those it had before it
knew of psworker, bit by bit. No thread, no network.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from psworker.backends.local_optimizer import LocalSteps, attach
from psworker.data.local_loader import LocalLoader, local_loader
from psworker.data.split_value import Split
from psworker.data.splitting import check_recorded, to_record
from psworker.errors import ConfigurationError
from psworker.optim.buffer_policies import BufferChoice, read_choice
from psworker.optim.named_objects import NamedObjects
from psworker.optim.prepare import (
    KINDS,
    check_clip_norm,
    check_kinds,
    check_loss,
    check_objects,
    check_overlap,
    check_same_clip_norm,
)
from psworker.optim.published import NOT_PREPARED_TEXT
from psworker.optim.push_result import PushResult
from psworker.refusals import at_entrance
from psworker.tensors.compression import CompressionChoice, read_compression
from psworker.torchrun import TorchrunProcess

if TYPE_CHECKING:
    from pswire.recorded_split import RecordedSplit

LOCAL_MODE: Final = "local"
LOCAL_WORKER_ID: Final = "local"


class LocalConnection:
    """A worker that is alone, with the interface of `Connection`.

    `prepare` returns the objects that it was given, and loaders that count what they
    hand out. Its optimizers take `step(weight=n)` and its loaders `set_epoch(n)` and
    `report`, as those of a job do.
    """

    def __init__(self, worker_id: str = "") -> None:
        self._worker_id = worker_id or LOCAL_WORKER_ID
        self._steps = LocalSteps(LOCAL_MODE)
        self._is_prepared = False
        self._loss = "mean"
        self._prepared: list[object] = []
        self._loaders: dict[int, Any] = {}  # by id() of the user's, which are kept
        self._unnamed_count = 0  # of loaders
        self._splits: dict[str, RecordedSplit] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._steps.is_closed else f"clock {self.clock}"
        return f"<psworker.LocalConnection {self.worker_id}, {state}>"

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, by `close` or by an error that passed through it."""
        return self._steps.is_closed

    @property
    def worker_id(self) -> str:
        """The id that was given, else `local`."""
        return self._worker_id

    @property
    def is_leader(self) -> bool:
        """True: this process speaks to the job by itself; see `HostConnection`."""
        return True

    @property
    def rank(self) -> int:
        """0: there is nobody else.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        if not self._is_prepared:
            raise ConfigurationError("a worker has a rank once prepare() was called")
        return 0

    @property
    def worker_count(self) -> int:
        """1, as soon as there is a rank.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        return self.rank + 1

    @property
    def clock(self) -> int:
        """Steps that were taken."""
        return self._steps.clock

    @property
    def generation(self) -> int:
        """0 before `prepare`, then 1: nobody comes or goes."""
        return int(self._is_prepared)

    @property
    def mode(self) -> str:
        """`local`."""
        return LOCAL_MODE

    @property
    def last_push(self) -> PushResult | None:
        """The newest step, `None` before the first."""
        return self._steps.last_push

    @property
    def bytes_sent(self) -> int:
        """0: there is nobody to send to."""
        return 0

    @property
    def bytes_received(self) -> int:
        """0: there is nobody to hear from."""
        return 0

    @at_entrance
    def prepare(
        self,
        /,
        *objects: Any,  # noqa: ANN401
        clip_grad_norm: float | None = None,
        buffers: BufferChoice = None,
        overlap: bool = False,
        compression: CompressionChoice = None,
        loss: str | None = None,
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401, what was given
        """Checks what it was given as a job would, and returns it.

        Called again, it takes another optimizer, as `Connection.prepare` does.

        Args:
            objects: Any of `nn.Module`, `torch.optim.Optimizer`, `DataLoader`,
                `LRScheduler` and `GradScaler`; at least one model and one optimizer.
            clip_grad_norm: Largest L2 norm of the gradient of a step; a larger one is
                scaled down to it. `None` for no clipping.
            buffers: As `Connection.prepare` has it; a process that is alone keeps its
                own.
            overlap: Changes nothing: there is nobody to send to.
            compression: Changes nothing either.
            loss: Nor does this: what its loss is, is that of one process.
            named: Further objects, by name.

        Returns:
            The same objects in the order of the call, a single one as it is, a dict
            for a dict; in the place of a loader one with the same batches that has a
            report.

        Raises:
            ConfigurationError: Something is missing, or of a kind that is not taken.
        """
        self._steps.refuse_closed()
        check_clip_norm(clip_grad_norm)
        check_overlap(overlap)
        check_loss(loss, self._loss if self._is_prepared else None)
        read_compression(compression)
        read_choice(buffers)
        call = NamedObjects.of(objects, named)
        fresh = call.without(self._is_known_loader)
        if self._is_prepared:
            check_same_clip_norm(clip_grad_norm, self._steps.clip_grad_norm)
            check_kinds(fresh)
        else:
            check_objects(fresh)
            for base, kind in KINDS.items():
                fresh.of_kind(base, kind)  # checks the names
            self._steps.clip_grad_norm = clip_grad_norm
            self._loss = loss or "mean"
        for each, given in zip(fresh.objects, fresh.names, strict=True):
            if any(each is known for known in self._prepared):
                continue  # given again, with another optimizer perhaps
            self._prepared.append(each)
            if isinstance(each, Optimizer):
                attach(each, self._steps)
            elif isinstance(each, DataLoader):
                name = given or f"loader{self._unnamed_count or ''}"
                self._unnamed_count += not given
                loader = local_loader(each, self._steps.draws, name=name)
                self._loaders[id(each)] = loader
        self._is_prepared = True
        if self._loaders:
            self._watch_calls()
        return call.returned(self._loaders)

    def _watch_calls(self) -> None:
        """For the reports of the loaders."""
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

    def _is_known_loader(self, each: object) -> bool:
        """Whether it is a loader that an earlier call has returned."""
        is_local = isinstance(each, LocalLoader)
        return is_local and any(each is known for known in self._loaders.values())

    def wait(self) -> None:
        """Returns at once: a step that has returned is complete.

        Raises:
            ClosedError: The connection is closed.
        """
        self._steps.refuse_closed()

    @at_entrance
    def record_split(self, name: str, split: Split) -> Split:
        """Notes a split; another one of the same name is refused, as in a job."""
        self._steps.refuse_closed()
        record = to_record(name, split)
        check_recorded(split, self._splits.setdefault(name, record))
        return split

    @at_entrance
    def publish(self, *what: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Changes nothing: what the script has set is what it trains with.

        Args:
            what: As `Connection.publish` has it.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        self._steps.refuse_closed()
        if not self._is_prepared:
            raise ConfigurationError(NOT_PREPARED_TEXT)

    def close(self) -> None:
        """Ends it; a later `step()` is refused, as in a job."""
        self._steps.is_closed = True


def alone_text(group: TorchrunProcess | None, count_text: str = "") -> str:
    """What a script is told once when it trains without a job.

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
