"""How the pushes of a worker leave, and how the values that answer them come."""

from collections.abc import Sequence

from pswire.schema import OptimizerSpec
from psworker.event_loop import EventLoop
from psworker.member.exchange import Delivery, PushExchange
from psworker.member.session import Session
from psworker.optim.step_contents import StepContents
from psworker.steps.job_tensors import JobTensors
from psworker.tensors.value_store import Scope
from psworker.transport.values import PushHeader


class Sending:
    """Sends a push within its step: nothing goes ahead, nothing is left under way.

    In the user's thread. `DuringBackward` is the other way.

    Attributes:
        loop: Where calls run.
        session: The worker.
        tensors: What it trains.
        overlaps: Whether the script may go on before the values of a step are there.
    """

    overlaps = False

    def __init__(self, loop: EventLoop, session: Session, tensors: JobTensors) -> None:
        self.loop = loop
        self.session = session
        self.tensors = tensors
        self._placement = tensors.store.placement
        self._compression = tensors.compression

    def begin(self, header: PushHeader, contents: StepContents) -> PushExchange:
        """The next push, with what of it was sent ahead."""
        encoder = None
        if not contents.trailer.publishes:
            loss_scale = contents.trailer.loss_scale
            encoder = self._compression.encoder(
                header.optimizer, header.seed_text, loss_scale=loss_scale
            )
        return PushExchange.begin(
            header,
            contents,
            placement=self._placement,
            incarnations=self.session.shards.incarnations,
            loop=self.loop,
            segments=self.session.shards.segments,
            encoder=encoder,
            is_forward_order=self.overlaps,
        )

    # Values

    @property
    def is_open(self) -> bool:
        """Whether a step was left under way."""
        return False

    def leave(
        self, exchange: PushExchange, delivery: Delivery, scope: Scope | None
    ) -> bool:
        """Leaves a push under way, whose values come while the script goes on.

        Args:
            exchange: The push.
            delivery: Makes its calls.
            scope: What its values may change, None for everything.

        Returns:
            Whether it does. If not, nothing is done.
        """
        return False

    def wait_for(self, entry_indexes: Sequence[int]) -> bool:
        """Waits for values of these tensors.

        Returns:
            Whether they are there. If not, they come when the step is settled.

        Raises:
            PsError: What has come could not be written. The push can go on.
        """
        return False

    def end_writing(self) -> None:
        """Returns once nothing is written any more; see `wait_for` for errors."""

    def complete(self) -> None:
        """The step that was left under way is settled."""

    def was_mixed(self, *, rejoined: bool) -> bool:
        """Whether what is computed since the last step is of other values than its.

        Args:
            rejoined: Whether the worker has joined again since.
        """
        return False

    # Gradients

    def gradient_is_there(self, entry_index: int) -> str | None:
        """A backward pass has added to a gradient: sends what is final by it.

        Returns:
            The optimizer whose push is to be opened by `begin_ahead` first, if any.
        """
        return None

    def begin_ahead(self, header: PushHeader) -> None:
        """Opens the next push, and sends what is final of it."""

    def drop(self) -> None:
        """Ends what was sent ahead of the next push: nothing of it counts."""

    def declare(self, spec: OptimizerSpec) -> None:
        """An optimizer has other groups now, or is another one."""

    def stepped(self, optimizer: str) -> None:
        """A step of an optimizer has taken the gradients that are there."""

    def close(self) -> None:
        """Ends all that is under way."""
