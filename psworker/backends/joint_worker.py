"""What each of several processes that are one worker says of that worker."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol, Self

import torch
from torch import nn

from psworker.errors import ConfigurationError, UnsupportedError
from psworker.left_behind import reduced


class Place(Protocol):
    """Where a worker stands in the job."""

    @property
    def rank(self) -> int:
        """Its index among the workers."""
        ...

    @property
    def worker_count(self) -> int:
        """Workers of the job."""
        ...

    @property
    def clock(self) -> int:
        """Clocks it has completed."""
        ...

    @property
    def generation(self) -> int:
        """Newest one known."""
        ...

    @property
    def mode(self) -> str:
        """How workers keep together."""
        ...


class JointWorker(ABC):
    """A process of several, as far as it is like a worker of its own."""

    _is_closed = False

    def __enter__(self) -> Self:
        return self

    @property
    @abstractmethod
    def worker_id(self) -> str:
        """The worker's name."""

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Refused: it is this process that is a part of the worker."""
        return reduced(
            f"the connection of worker {self.worker_id or 'without an id'}",
            "it is this process that is a part of the worker",
        )

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, by `close` or by an error that passed through it."""
        return self._is_closed

    @property
    @abstractmethod
    def _place(self) -> Place | None:
        """That of the worker, None before `prepare`."""

    def publish(self, *what: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Not in a group: each process would need the values of all the others.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "publish() is not possible in a group of processes that push as one: set "
            "values before prepare(), or start each process as a worker of its own"
        )

    @property
    def rank(self) -> int:
        """The worker's index among the workers of the job, as of joining.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        if self._place is None:
            raise ConfigurationError("a worker has a rank once prepare() was called")
        return self._place.rank

    @property
    def worker_count(self) -> int:
        """Workers of the job, of which all these processes are one.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        if self._place is None:
            raise ConfigurationError("the workers are known once prepare() was called")
        return self._place.worker_count

    @property
    def clock(self) -> int:
        """Clocks the worker has completed."""
        return 0 if self._place is None else self._place.clock

    @property
    def generation(self) -> int:
        """Newest generation known here."""
        return 0 if self._place is None else self._place.generation

    @property
    def mode(self) -> str:
        """How workers keep together; empty where it is not known yet."""
        return "" if self._place is None else self._place.mode
