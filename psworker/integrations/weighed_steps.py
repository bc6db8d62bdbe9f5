"""Steps that a framework takes, with the number of samples behind them."""

from collections.abc import Callable
from types import MethodType
from typing import Any, Final

from torch.optim import Optimizer

from psworker.errors import JobEndedError, JobFailedError

_WRAPPED_BY_SCHEDULER: Final = "_wrapped_by_lr_sched"

UNSPLIT_TEXT: Final = (
    "an IterableDataset is not split between the workers: split it in the data set, or "
    "every worker trains on all of it"
)


class SampleCounter:
    """Samples that were trained on since the last step.

    A further step on the same samples, as a GAN takes it, has as many. A step after
    batches that were all skipped has none.
    """

    def __init__(self) -> None:
        self._count = 0.0
        self._last = 1.0
        self._newest = 0.0  # of the batch that was begun last, until it is counted
        self._begun = 0.0  # of all that were begun since the last step
        self._sees_backward = False

    def begin(self, count: float) -> None:
        """Notes a batch that the script may skip yet."""
        self._newest = count
        self._begun += count

    def reach(self) -> None:
        """Counts the batch that was begun last: the script goes backward with it."""
        self._sees_backward = True
        self._count += self._newest
        self._newest = 0.0

    def skip(self) -> None:
        """Drops the batch that was begun last: there is no backward pass."""
        self._sees_backward = True
        self._newest = 0.0

    def add(self, count: float) -> None:
        """Notes samples."""
        self._count += count

    def put(self, count: float) -> None:
        """Notes the samples of the whole step, in place of what was noted before."""
        self._count = count

    def take(self) -> float:
        """The weight of the step that is taken now."""
        begun, self._begun = self._begun, 0.0
        if not self._sees_backward:
            # A script that goes backward by itself: all may be behind its gradient.
            self._count += begun
        if self._count:
            self._last, self._count = self._count, 0.0
            return self._last
        return 0.0 if begun else self._last


def weigh_steps(
    optimizer: Optimizer,
    weight_of: Callable[[], float],
    on_job_end: Callable[[JobEndedError], None] | None = None,
) -> None:
    """Lets `optimizer.step()` carry a weight that is asked for at each step.

    A closure is called first, here: shards could not.

    Args:
        optimizer: As `prepare` has returned it.
        weight_of: Number of samples behind the gradient.
        on_job_end: Called, in place of an error, when the job is over. A job that can't
            go on stays an error.
    """
    inner: Callable[..., Any] = optimizer.step

    def step(
        self: Optimizer,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float | None = None,
    ) -> Any:  # noqa: ANN401, what the closure returns
        loss = closure() if closure is not None else None
        # After the closure, which is what trains on samples.
        try:
            inner(weight=weight_of() if weight is None else weight)
        except JobEndedError as error:
            if on_job_end is None or isinstance(error, JobFailedError):
                raise
            on_job_end(error)
        return loss

    # Schedulers of both kinds of connection know the inner one already.
    setattr(step, _WRAPPED_BY_SCHEDULER, True)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
