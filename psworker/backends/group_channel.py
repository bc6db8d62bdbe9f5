"""What the processes of a data-parallel group tell each other.

Over a gloo group of our own, so that no call of ours can meet one of the user's, and
on the CPU, whatever the user's group uses. Every call here is collective: all processes
of the group make the same calls in the same order.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pswire.reasons import ErrorReason
from pswire.torch_types import bytes_of
from psworker.errors import ConfigurationError, PsError, UnavailableError
from psworker.optim.wrappers import data_parallel_in
from psworker.tensors.value_store import same_bytes

T = TypeVar("T")

logger: Final = logging.getLogger("psworker")

_LEADER: Final = 0
_BUCKET_BYTES: Final = 64 * 2**20
"""Values travel in buckets of about this size: a copy of so much is made at a time."""


def is_in_group() -> bool:
    """Whether this process is one of several that `torch.distributed` connects."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def refuse_late_group(objects: Iterable[object]) -> None:
    """Checks that no process became a worker by itself before it was in a group.

    Raises:
        ConfigurationError: A model is data-parallel, over a group that was made after
            `connect()`.
    """
    if is_in_group() and any(
        isinstance(each, nn.Module) and data_parallel_in(each) for each in objects
    ):
        raise ConfigurationError(
            "torch.distributed was set up after psworker.connect(), so that each "
            "process of the group became a worker by itself: call "
            "init_process_group() before connect()"
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error of the leader, on its way to the others."""

    kind: type[PsError]
    text: str
    reason: ErrorReason | None
    facts: dict[str, str]

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        if isinstance(error, PsError):
            return cls(type(error), str(error), error.reason, error.facts)
        return cls(PsError, f"{type(error).__name__}: {error}", None, {})

    def to_error(self) -> PsError:
        return self.kind(
            f"rank {_LEADER} of this process group, which speaks to the job for all of "
            f"it, failed: {self.text}",
            reason=self.reason,
            facts=self.facts,
        )


class GroupChannel:
    """The processes of the default group of `torch.distributed`.

    Attributes:
        rank: Of this process in the group.
        process_count: Processes of the group.
    """

    def __init__(self, timeout_s: float) -> None:
        """Opens the channel, in all processes.

        Args:
            timeout_s: Longest wait for the leader to do what all wait for.
        """
        self.rank = dist.get_rank()
        self.process_count = dist.get_world_size()
        with _told_to_users(self.rank):
            self._group: Any = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=timeout_s)
            )

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job."""
        return self.rank == _LEADER

    def led(self, work: Callable[[], T]) -> T:
        """Does `work` in the leader; its result, or its error, in all processes.

        Args:
            work: What the leader does. Its result must be one that can be pickled.

        Raises:
            PsError: The leader failed, or is gone. In the leader, whatever it raised.
        """
        if not self.is_leader:
            told = self._tell(None)
            if isinstance(told, _Failure):
                raise told.to_error()
            result: T = told
            return result
        try:
            result = work()
        except BaseException as error:
            self._tell_failure(error)
            raise
        self._tell(result)
        return result

    def sum(self, value: float) -> float:
        """The sum of the values that the processes give."""
        total = torch.tensor([value], dtype=torch.float64)
        with _told_to_users(self.rank):
            dist.all_reduce(total, group=self._group)
        return float(total.item())

    def spread(self, tensors: Iterable[torch.Tensor], device_group: Any) -> None:  # noqa: ANN401, untyped in torch
        """Gives all processes the leader's values.

        Args:
            tensors: The same in all processes, of any shapes, types and devices.
            device_group: The group that carries tensors which are not on the CPU.
        """
        with torch.no_grad():
            for bucket in _buckets(tensors):
                device = bucket[0].device
                sizes = [each.nbytes for each in bucket]
                if self.is_leader:
                    flat = torch.cat([bytes_of(each) for each in bucket])
                else:
                    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
                group = self._group if device.type == "cpu" else device_group
                with _told_to_users(self.rank):
                    dist.broadcast(flat, src=_LEADER, group=group)
                if not self.is_leader:
                    for tensor, piece in zip(bucket, flat.split(sizes), strict=True):
                        values = piece.view(tensor.dtype)
                        if not same_bytes(tensor, values):  # graphs may hold it
                            tensor.copy_(values.view(tensor.shape))

    def close(self) -> None:
        """Ends the channel, if the user has not ended the group that it stands on."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _tell(self, message: object) -> Any:  # noqa: ANN401, what the leader tells
        messages = [message]
        with _told_to_users(self.rank):
            dist.broadcast_object_list(messages, src=_LEADER, group=self._group)
        return messages[0]

    def _tell_failure(self, error: BaseException) -> None:
        try:
            self._tell(_Failure.of(error))
        except UnavailableError as unheard:
            # The first error is the one to raise.
            logger.warning(
                "could not send the error to the other processes: %s", unheard
            )


@contextmanager
def _told_to_users(rank: int) -> Iterator[None]:
    """Turns the end of a peer into an error that says what to do.

    Args:
        rank: Of this process. All but the leader wait for the leader, whose end is
            that of the group; in a large group another process may be between them.
    """
    try:
        yield
    except RuntimeError as error:
        lost = "another process of this process group has ended or is silent"
        if rank != _LEADER:
            lost = (
                f"rank {_LEADER} of this process group, which speaks to the job for "
                "all of it, did not answer: it or another process of the group has "
                "ended or is silent"
            )
        raise UnavailableError(
            f"{lost}, and the group can't go on without it; torchrun ends what is "
            f"left and, with --max-restarts, starts the group again ({error})"
        ) from None


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """Runs of one device each; wide types first, so that every view is aligned."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        bucket: list[torch.Tensor] = []
        bucket_bytes = 0
        for tensor in sorted(members, key=lambda each: -each.element_size()):
            if bucket and bucket_bytes >= _BUCKET_BYTES:
                yield bucket
                bucket, bucket_bytes = [], 0
            bucket.append(tensor)
            bucket_bytes += tensor.nbytes
        yield bucket
