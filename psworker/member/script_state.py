"""What a script has beside the job's values: kept for checkpoints, set back by them.

The worker that leads keeps a copy of what is registered with `register_state`, as of
each step while the job makes checkpoints: it hears which push a checkpoint's cut has
when its script has gone on. Copies are made in the script's thread, between two of its
lines; the event loop reads them.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from torch.optim.lr_scheduler import LRScheduler

from pswire.checkpoint.errors import DamagedError
from pswire.checkpoint.registered_state import (
    NotStorableError,
    decode_states,
    encode_states,
)
from psworker.errors import ConfigurationError, SnapshotError
from psworker.member.membership import Membership
from psworker.transport.values import StateWanted

logger: Final = logging.getLogger("psworker")

STEP_COUNT_MAX: Final = 64
"""Steps of which copies are kept: those that a worker makes at most while it hears of
a cut, for which each shard copies all that it holds before it goes on."""

BYTE_COUNT_MAX: Final = 64 << 20
"""Of all copies, beyond those of the newest two steps."""


class HasState(Protocol):
    """An object whose state goes with checkpoints."""

    def state_dict(self) -> Any:  # noqa: ANN401, tensors and plain values
        """What is stored."""

    def load_state_dict(self, state_dict: Any, /) -> object:  # noqa: ANN401
        """Takes what was stored."""


@dataclass(slots=True)
class _AfterStep:
    """Copies as of one step: of each epoch in which the script went on after it."""

    sequence: int
    copies: dict[int, bytes] = field(default_factory=dict)


class StateCopies:
    """State as of the last steps. Safe in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = deque([_AfterStep(0)])
        self._is_over = False

    def step(self, sequence: int) -> None:
        """The script makes a step, by the push of this number."""
        with self._lock:
            if sequence > self._steps[-1].sequence:
                # Where there are no copies, there is nothing as of any of them.
                kept = self._steps if any(each.copies for each in self._steps) else ()
                # In one move: Ctrl-C may end the step between any two lines.
                self._steps = deque([*kept, _AfterStep(sequence)])
            while len(self._steps) > 2 and (
                len(self._steps) > STEP_COUNT_MAX or self._byte_count > BYTE_COUNT_MAX
            ):
                self._steps.popleft()

    def lacks(self, epoch: int | None) -> bool:
        """Whether there is no copy as of the last step in an epoch, or in any."""
        copies = self._steps[-1].copies
        return not copies if epoch is None else epoch not in copies

    def keep(self, epoch: int, state: bytes) -> None:
        """Keeps a copy: the script goes on in this epoch, after its last step."""
        with self._lock:
            self._steps[-1].copies[epoch] = state

    def end(self) -> None:
        """The script is done: there will be no more copies."""
        with self._lock:
            self._is_over = True

    def after(self, sequence: int, epoch: int) -> bytes | None:
        """State as of a push, when the script has gone on from it.

        Where the epoch was over as of the cut, the script is in the next one then: what
        it does at the end of an epoch is done.

        Args:
            sequence: The push, be it one that the script has not made itself.
            epoch: The first epoch that was not over as of the cut.

        Returns:
            The state, empty for none, or None as long as the script has not gone on.
        """
        with self._lock:
            found = None
            for step in self._steps:
                if step.sequence <= sequence:
                    found = step
            if found is None:
                return b""
            later = [each for each in found.copies if each >= epoch]
            if later:
                return found.copies[min(later)]
            if found is self._steps[-1] and not self._is_over:
                return None
            return found.copies[max(found.copies)] if found.copies else b""

    @property
    def newest(self) -> bytes:
        """The newest copy, if it is as of the last step; else empty."""
        with self._lock:
            copies = self._steps[-1].copies
            return copies[max(copies)] if copies else b""

    @property
    def _byte_count(self) -> int:
        return sum(len(each) for step in self._steps for each in step.copies.values())


class ScriptState:
    """What a script has registered: made on the event loop, used in its thread.

    Attributes:
        loader: Name of the first loader that was prepared, empty without any.
        epoch: Epoch that the script has drawn a batch of it from last.
        copies: As of the last steps of this start of the worker.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._objects: dict[str, HasState] = {}
        self._stored: dict[str, Any] = {}
        self._checkpoint = ""
        self._has_joined = False
        self._loop = asyncio.get_running_loop()
        self._kept = asyncio.Event()
        self.loader = ""
        self.epoch = 0
        self._has_warned = False
        self.copies = StateCopies()

    def begin(self, membership: Membership) -> None:
        """A new start of the worker, with pushes of its own; on the event loop."""
        self._membership = membership
        self.copies = StateCopies()

    @property
    def is_sent(self) -> bool:
        """Whether there is anything for checkpoints, and the job makes them."""
        has_any = bool(self._objects or self._stored)
        return has_any and self._membership.makes_checkpoints

    def register(self, name: str, holder: HasState) -> None:
        """Takes an object, and loads what the job's checkpoint has of it.

        Raises:
            ConfigurationError: The name is taken.
            NotStorableError: Its state can't be stored.
        """
        known = self._objects.get(name)
        if known is not None and known is not holder:
            raise ConfigurationError(
                f"register_state({name!r}): another object has this name; register "
                "each object under a name of its own"
            )
        encode_states({name: holder.state_dict()})
        self._objects[name] = holder
        if self._has_joined:
            self._load(name)

    def joined(self, loader: str) -> None:
        """The worker is a member; the loader is the first that was prepared."""
        self._has_joined = True
        self.loader = loader

    def load(self, checkpoint: str, state: bytes) -> list[str]:
        """Loads what a checkpoint has; what nobody has registered yet is kept.

        Returns:
            Names of what is loaded.

        Raises:
            SnapshotError: It is not as it was written.
        """
        try:
            self._stored = decode_states(state) if state else {}
        except DamagedError as error:
            raise SnapshotError(
                f"the registered state of checkpoint {checkpoint} is damaged: {error}"
            ) from None
        self._checkpoint = checkpoint
        return [name for name in self._objects if self._load(name)]

    def draw(self, loader: str, epoch: int) -> None:
        """The script asks for a batch of an epoch: its last step is behind it."""
        if loader == self.loader:
            self.epoch = epoch
            if self.is_sent and self.copies.lacks(epoch):
                self._keep(epoch)

    def step(self, sequence: int) -> None:
        """The script makes a step, by the push of this number."""
        if self.is_sent and self.copies.lacks(None):
            self._keep(self.epoch)
        self.copies.step(sequence)

    def end(self) -> bytes:
        """The script is done; what it has registered, as it is now."""
        if not self.is_sent:
            return b""
        state = self._encoded()
        self.copies.keep(self.epoch + 1, state)
        self.copies.end()
        self._loop.call_soon_threadsafe(self._kept.set)
        return state

    async def wanted(self, wanted: StateWanted) -> bytes:
        """State as of a push, once the script has gone on from it."""
        epoch = wanted.epochs.get(self.loader, 0)
        while True:
            self._kept.clear()
            state = self.copies.after(wanted.sequence, epoch)
            if state is not None:
                return state
            await self._kept.wait()

    def _keep(self, epoch: int) -> None:
        record, worker = self._membership.record, self._membership.worker
        if record is not None and record.has_longest(worker):
            self.copies.keep(epoch, self._encoded())
            self._loop.call_soon_threadsafe(self._kept.set)

    def _encoded(self) -> bytes:
        states = {name: each.state_dict() for name, each in self._objects.items()}
        try:
            return encode_states(self._stored | states)
        except NotStorableError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "checkpoints are without registered state from now on: %s", error
                )
            return b""

    def _load(self, name: str) -> bool:
        """Loads one, if the checkpoint has it."""
        if name not in self._stored:
            if self._checkpoint:
                logger.warning(
                    "checkpoint %s, from which the job goes on, has no state of %r: "
                    "it stays as it is",
                    self._checkpoint,
                    name,
                )
            return False
        holder, state = self._objects[name], self._stored.pop(name)
        holder.load_state_dict(state)
        if isinstance(holder, LRScheduler):
            # As the optimizer's own state would have them after a resume.
            rates = holder.get_last_lr()
            for group, rate in zip(holder.optimizer.param_groups, rates, strict=False):
                group["lr"] = rate
        return True


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
    """Returns of the job to a checkpoint, in a process that lives through them.

    Shards have the values of the checkpoint again, and the worker has joined anew. What
    the process keeps beside them is set back when the script goes on from the step in
    which that was noticed: the rest of the loop's body belongs to a step that is void.
    Used in the script's thread.
    """

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
