"""One step of a worker, as it tells it on a line of its stdout."""

import json
from dataclasses import asdict, dataclass

from psctl.failures import CommandError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that has ended. Times are on the machine's monotonic clock.

    Attributes:
        worker_index: Whose.
        began_s: When its values were there.
        computed_s: When its gradient was; what the step's own work took.
        pushed_s: When `optimizer.step()` was called, after the wait.
        ended_s: When that call returned.
        clock: Clock of the worker after it.
        is_dropped: Whether its gradient is in no update.
        staleness: Updates between the values of its gradient and its own.
    """

    worker_index: int
    began_s: float
    computed_s: float
    pushed_s: float
    ended_s: float
    clock: int
    is_dropped: bool
    staleness: int

    def to_line(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def read_step(text: str) -> Step:
    """Reads a line.

    Raises:
        CommandError: It's none.
    """
    try:
        return Step(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise CommandError(f"a worker printed {text[:200]!r}") from error
