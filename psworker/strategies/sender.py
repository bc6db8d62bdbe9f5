"""Pushes beside the script: its local steps go on while the job answers."""

from collections.abc import Callable, Collection
from contextlib import ExitStack

import torch

from psworker.event_loop import LoopFuture
from psworker.side_thread import SideThread


class Sender:
    """Makes pushes in a thread of its own, one at a time.

    Its methods are for the script's thread. What is computed on a CUDA device for a
    push is queued on the stream that the script has chosen when it sends, so that it is
    in order with the script's own steps.
    """

    def __init__(self) -> None:
        self._thread: SideThread | None = None
        self._answer: LoopFuture[None] | None = None
        self._work: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a push was sent that `finish` has not ended."""
        return self._answer is not None

    def is_answered(self) -> bool:
        """Whether `finish` would return, or raise, at once."""
        self._submit()
        return self._answer is not None and self._answer.done()

    def send(
        self, push: Callable[[], None], devices: Collection[torch.device] = ()
    ) -> None:
        """Begins a push; returns at once.

        Args:
            push: Makes it, and returns when the job has answered.
            devices: Where its tensors are.
        """
        assert self._answer is None, "one push is under way at a time"
        if self._thread is None:
            self._thread = SideThread("psworker-sender")
        streams = [
            torch.cuda.current_stream(device)
            for device in devices
            if device.type == "cuda"
        ]

        def on_streams() -> None:
            with ExitStack() as entered:
                for stream in streams:
                    entered.enter_context(torch.cuda.stream(stream))
                push()

        # Ctrl-C may come between any two of these lines: the push is known of before it
        # can begin, and one that was perhaps not submitted is submitted again.
        self._work = on_streams
        self._answer = LoopFuture()
        self._submit()

    def finish(self) -> None:
        """Returns once the job has answered.

        Raises:
            PsError: As the push itself. None is under way then.
        """
        answer = self._answer
        assert answer is not None, "a push was sent"
        self._submit()
        answer.wait()  # interrupted, it is still under way
        self._answer = None
        answer.result()

    def drop(self) -> None:
        """Ends a push that is under way once it has returned, whatever it says."""
        if self._answer is not None:
            self._submit()
            self._answer.wait()
            self._answer = None

    def close(self) -> None:
        """Ends the thread; a push that is under way has been cancelled before."""
        if self._thread is not None:
            self._thread.close(waits=not self.is_open)
            self._thread = None

    def _submit(self) -> None:
        if self._answer is not None and self._work is not None:
            assert self._thread is not None, "it was made for the push"
            self._thread.submit(self._work, self._answer)
            self._work = None
