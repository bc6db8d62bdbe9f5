"""Returns of the job to a checkpoint, as a process that lives through them follows.

Shards have the values of the checkpoint again, and the worker has joined anew. What the
process keeps beside them is set back when the script goes on from the step in which
that was noticed: the rest of the loop's body belongs to a step that is void.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from psworker.member.script_state import ScriptState

logger: Final = logging.getLogger("psworker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """A return of the job to a checkpoint, of which `ps.on_rewind` tells a script.

    Attributes:
        checkpoint: Name of the checkpoint.
        from_clock: Clocks that this worker had completed.
        to_clock: Those that it goes on from.
        from_epoch: Epoch that its first prepared loader was in.
        to_epoch: The first one that is not over as of the checkpoint. Batches of it
            come first, also within an iteration of `from_epoch`.
    """

    checkpoint: str
    from_clock: int
    to_clock: int
    from_epoch: int
    to_epoch: int


RewindCallback = Callable[[Rewind], object]


class Rewinds:
    """Used in the script's thread."""

    def __init__(self, script_state: ScriptState) -> None:
        self._script_state = script_state
        self._followers: list[Callable[[Rewind], Iterable[str]]] = []
        self._callbacks: list[RewindCallback] = []
        self._begun: tuple[Rewind, bytes] | None = None

    @property
    def is_begun(self) -> bool:
        """Whether the job has returned, and the script has not gone on since."""
        return self._begun is not None

    def add_follower(self, follow: Callable[[Rewind], Iterable[str]]) -> None:
        """Has `follow` set back what it can; it returns what stays, in words."""
        self._followers.append(follow)

    def add_callback(self, callback: RewindCallback) -> None:
        """Has the script's own `callback` be called when all else is set back."""
        self._callbacks.append(callback)

    def begin(self, rewind: Rewind, state: bytes) -> None:
        """The worker has joined again, after a return to a checkpoint.

        Args:
            rewind: From where to where.
            state: What the checkpoint has of registered state, empty for nothing.
        """
        if self._begun is not None:  # the script has not gone on from the one before
            before, _ = self._begun
            rewind = replace(
                rewind, from_clock=before.from_clock, from_epoch=before.from_epoch
            )
        self._begun = rewind, state

    def end(self) -> None:
        """The script goes on: sets back what is to be, if it is.

        Raises:
            SnapshotError: Registered state is not as it was written.
            BaseException: Whatever a callback raises.
        """
        if self._begun is None:
            return
        (rewind, state), self._begun = self._begun, None
        stays = [text for follow in self._followers for text in follow(rewind)]
        loaded = self._script_state.load(rewind.checkpoint, state)
        back = ["its model", "its optimizers", "the schedulers of prepare()"]
        back += map(repr, loaded)
        logger.warning(
            "the job has returned to checkpoint %s, and this worker from clock %d of "
            "epoch %d to clock %d of epoch %d: %s and %s are as they were there%s. "
            "Whatever else the script keeps stays as it is, such as random numbers, "
            "counters and a log%s",
            *(rewind.checkpoint, rewind.from_clock, rewind.from_epoch),
            *(rewind.to_clock, rewind.to_epoch),
            *(", ".join(back[:-1]), back[-1]),
            f", but for {', '.join(stays)}" if stays else "",
            ""
            if self._callbacks
            else ": ps.register_state() and ps.on_rewind() set it back",
        )
        for callback in self._callbacks:
            callback(rewind)
