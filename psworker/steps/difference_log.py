"""Tells a worker once whose hyperparameters count instead of its own."""

import logging
from collections.abc import Iterable
from typing import Final

from psworker.transport.values import HyperparameterDifference, PushReply

logger: Final = logging.getLogger("psworker")


class DifferenceLog:
    """Warns of each optimizer and worker that differs once, whichever shard tells."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def note(self, replies: Iterable[PushReply]) -> None:
        """Reads what the shards' replies to a push tell."""
        for reply in replies:
            difference = reply.difference
            if difference is None:
                continue
            pair = (difference.optimizer, difference.worker_id)
            if pair not in self._told:
                self._told.add(pair)
                logger.warning("%s", _text(difference))


def _text(difference: HyperparameterDifference) -> str:
    changed = [
        (name, own, used)
        for name, own, used in zip(
            difference.names, difference.own, difference.used, strict=True
        )
        if own != used
    ]
    own = ", ".join(f"{name}={own:g}" for name, own, _ in changed)
    used = ", ".join(f"{name}={used:g}" for name, _, used in changed)
    return (
        f"workers step {difference.optimizer} with different hyperparameters, first "
        f"seen at clock {difference.clock}: those of {difference.worker_id} count, "
        f"which is longest in the job, {used} in group {difference.group}, and this "
        f"worker's do not, {own}; let scripts and schedules of all workers agree"
    )
