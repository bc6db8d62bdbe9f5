"""TensorBoard: loss, staleness, bytes and seconds of each step of a worker.

with StepWriter(ps, "runs/w0") as writer:
writer.watch(optimizer)
...
writer.note_loss(loss)
optimizer.step()
"""

import time
from os import PathLike
from typing import Any, Final, Self

from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter

from psworker.connection import Connection

_PREFIX: Final = "paramserver"


class StepWriter:
    """Writes loss, staleness, clock, version, bytes and seconds of every step.

    The step of a point is the worker's clock, so that the curves of several workers lie
    over each other.
    """

    def __init__(
        self, ps: Connection, writer: SummaryWriter | str | PathLike[str]
    ) -> None:
        """Writes the steps of a connection.

        Args:
            ps: The connection.
            writer: Where to; a folder gets a writer of its own, which `close` ends.
        """
        self._ps = ps
        self._is_own = not isinstance(writer, SummaryWriter)
        self._writer = (
            writer if isinstance(writer, SummaryWriter) else SummaryWriter(str(writer))
        )
        self._loss: float | None = None
        self._sent = ps.bytes_sent
        self._received = ps.bytes_received
        self._ended_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, optimizer: Optimizer) -> None:
        """Writes a point after each step of an optimizer that `prepare` returned."""
        optimizer.register_step_post_hook(self._write)

    def note_loss(self, loss: Any) -> None:  # noqa: ANN401, a tensor or a number
        """The loss that goes with the next step."""
        self._loss = float(loss.detach() if hasattr(loss, "detach") else loss)

    def close(self) -> None:
        """Ends a writer of its own."""
        if self._is_own:
            self._writer.close()

    def _write(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        push = self._ps.last_push
        if push is None:
            return
        sent, received = self._ps.bytes_sent, self._ps.bytes_received
        now_s = time.monotonic()
        points: dict[str, float] = {
            "clock": push.clock,
            "version": push.version,
            "staleness": push.staleness,
            "sent_bytes": sent - self._sent,
            "received_bytes": received - self._received,
        }
        if self._ended_s is not None:
            points["step_seconds"] = now_s - self._ended_s
        if self._loss is not None:
            points["loss"] = self._loss
        for name, value in points.items():
            self._writer.add_scalar(f"{_PREFIX}/{name}", value, push.clock)
        self._sent, self._received, self._loss = sent, received, None
        self._ended_s = now_s
