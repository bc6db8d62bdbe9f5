"""What `connect()` returns, whatever is behind it."""

from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from pswire.compression import Compression
from psworker.optim.buffer_policies import BufferChoice
from psworker.optim.push_result import PushResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from psworker.data.split_value import Split


class WorkerConnection(Protocol):
    """A process that trains: as a worker of a job, or alone.

    `psworker.Connection` is one to a job, `psworker.LocalConnection` one without, and
    a group of `torch.distributed` has one to a job in each of its processes. A script
    that works with one works with the others, and need not know which it has.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, by `close` or by an error that passed through it."""
        ...

    @property
    def worker_id(self) -> str:
        """Stable name of this worker."""
        ...

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job, for itself or for a group."""
        ...

    @property
    def rank(self) -> int:
        """Dense index among the workers, as of joining.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        ...

    @property
    def worker_count(self) -> int:
        """Workers that train now, with this one.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        ...

    @property
    def clock(self) -> int:
        """Clocks this worker has completed, with the one it joined at."""
        ...

    @property
    def generation(self) -> int:
        """Newest generation known here; grows when workers come or go."""
        ...

    @property
    def mode(self) -> str:
        """How workers keep together: `bsp`, `ssp` or `asp`; `local` if it is alone."""
        ...

    @property
    def last_push(self) -> PushResult | None:
        """What became of the newest push, `None` before the first."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages to shards."""
        ...

    @property
    def bytes_received(self) -> int:
        """Bytes of all messages from shards."""
        ...

    def prepare(
        self,
        /,
        *objects: Any,  # noqa: ANN401
        clip_grad_norm: float | None = None,
        buffers: BufferChoice = None,
        overlap: bool = False,
        compression: str | Compression | None = None,
        loss: str | None = None,
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401, what was given
        """Makes models, optimizers, loaders and schedulers ready to train.

        Returns:
            The same in the order of the call, a single one as it is, a dict for a
            dict.
        """
        ...

    def wait(self) -> None:
        """Returns once the newest values are in the models."""

    def publish(
        self, *what: "nn.Module | torch.Tensor | Iterable[torch.Tensor]"
    ) -> None:
        """Makes values that the script has set by itself those of the job."""

    def record_split(self, name: str, split: "Split") -> "Split":
        """Records a split of data, or checks it against the one of that name.

        Returns:
            The same split.

        Raises:
            SplitError: Another one is recorded under that name.
        """
        ...

    def close(self) -> None:
        """Ends it. More calls do nothing."""
        ...
