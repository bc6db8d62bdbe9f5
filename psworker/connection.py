"""What `connect()` returns, whatever trains behind it."""

import atexit
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import nn

from pswire.checkpoint.registered_state import NotStorableError
from pswire.limits import NUMBER_MAX
from pswire.number_range import NumberRange
from psworker.backends.backend import Backend
from psworker.backends.local import Local
from psworker.data import LeasedLoader, Split
from psworker.data.splitting import check_recorded, to_record
from psworker.errors import (
    ConfigurationError,
    refuse_closed,
    refuse_name,
    refuse_numbers,
)
from psworker.left_behind import reduced
from psworker.member.script_state import HasState, RewindCallback
from psworker.optim.buffer_policies import BufferChoice
from psworker.optim.checks import check_called_once, check_overlap
from psworker.optim.named_objects import NamedObjects
from psworker.optim.prepare import PrepareOptions
from psworker.optim.privacy import DifferentialPrivacy
from psworker.optim.published import NOT_PREPARED_TEXT
from psworker.optim.push_result import PushResult
from psworker.optim.user_calls import UserCalls
from psworker.strategies.engine import Engine
from psworker.strategies.script_hooks import hook_script
from psworker.strategies.strategy import Strategy
from psworker.tensors.compression import CompressionChoice
from psworker.tracebacks import at_entrance

if TYPE_CHECKING:
    from psworker.metrics_port import MetricsPort

T = TypeVar("T")


class Connection:
    """A process that trains: as a worker of a job, as a part of one, or alone.

    A context manager: leaving it leaves the job. An exception that passes through it
    does not: the worker then counts as lost. All processes of a group that push as one
    have one `worker_id`, `rank` and `clock`, and make the same calls.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        wait_s: float = 60.0,
        metrics_port: "MetricsPort | None" = None,
    ) -> None:
        """Connects a script with a backend.

        Args:
            backend: What trains.
            wait_s: Longest wait of a call for that of another thread.
            metrics_port: Served until it is closed.
        """
        self._backend = backend
        self._calls = UserCalls(wait_s)
        self._loaders: list[LeasedLoader] = []
        self._engine: Engine | None = None  # with a strategy
        self._is_closed = False
        self._metrics_port = metrics_port
        if backend.coordinator:  # else there is nothing to leave
            self._error_at_start = getattr(sys, "last_value", None)
            atexit.register(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._end(leaves=False)

    def __repr__(self) -> str:
        backend, place = self._backend, self._backend.place
        at = f" at {backend.coordinator}" if backend.coordinator else ""
        state = "closed" if self._is_closed else f"clock {place.clock}"
        who = f"{type(self).__name__} {place.worker_id}{at}"
        return f"<psworker.{', '.join(filter(None, (who, backend.title, state)))}>"

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:  # noqa: ANN401
        """Refused where there is a job: this process is the worker."""
        if not self._backend.coordinator:
            return super().__reduce_ex__(protocol)
        return reduced(
            f"the connection of worker {self.worker_id or 'without an id'}",
            "it is this process that is the worker",
        )

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, by `close` or by an error that passed through it."""
        return self._is_closed

    @property
    def worker_id(self) -> str:
        """Stable name of this worker; before it has one, that it wants, if any."""
        return self._backend.place.worker_id

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job, for itself or for a group."""
        return self._backend.is_leader

    @property
    def rank(self) -> int:
        """Dense index among the workers, as of joining.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        rank = self._backend.place.rank
        if rank is None:
            raise ConfigurationError("a worker has a rank once prepare() was called")
        return rank

    @property
    def worker_count(self) -> int:
        """Workers of the job now, with this one; as few as the ranks there are.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        count = self._backend.place.worker_count
        if not count:
            raise ConfigurationError("the workers are known once prepare() was called")
        return count

    @property
    def clock(self) -> int:
        """Clocks this worker has completed, with the one it joined at.

        It moves when the mode changes, and when an evicted worker joins again.
        """
        self._look()
        return self._backend.place.clock

    @property
    def epoch(self) -> int:
        """Epoch, from 0, that the newest iteration of the first prepared loader is of.

        Before the first iteration, the first epoch that is not over in the job: 0, but
        for a worker that joins late, and in a job that goes on from a checkpoint.
        Without such a loader 0.
        """
        return self._loaders[0].epoch if self._loaders else 0

    @property
    def generation(self) -> int:
        """Newest generation known here; grows when workers come or go."""
        return self._backend.place.generation

    @property
    def mode(self) -> str:
        """How workers keep together: `bsp`, `ssp`, `asp` or `quorum`; alone `local`.

        Empty in a group of processes whose leader has not joined yet.
        """
        return self._backend.place.mode

    @property
    def last_push(self) -> PushResult | None:
        """What became of the newest push, `None` before the first."""
        self._look()
        return self._backend.place.last_push

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages to shards; of a group, in the process that leads."""
        return self._backend.traffic.sent_bytes

    @property
    def bytes_received(self) -> int:
        """Bytes of all messages from shards; of a group, in the process that leads."""
        return self._backend.traffic.received_bytes

    @at_entrance
    def prepare(
        self,
        /,
        *objects: Any,  # noqa: ANN401
        clip_grad_norm: float | None = None,
        buffers: BufferChoice = None,
        overlap: bool = False,
        compression: CompressionChoice = None,
        loss: str | None = None,
        differential_privacy: DifferentialPrivacy | None = None,
        strategy: Strategy | None = None,
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401, what was given
        """Joins the job with models, optimizers, loaders and schedulers.

        Returns when the job has started and the model holds its values. Give it
        everything at once; where there are several of a kind, by name, as in
        `prepare(generator=G, discriminator=D, opt_g=og, opt_d=od)`: what has no name
        is matched between workers by its place in the call. Called again with the same
        models and a new optimizer, it puts that in the place of the last one, on all
        shards; all workers of a script do so at the same place.

        In a group of processes that push as one all call it with the same; where
        `DistributedDataParallel` makes the group, a loader needs a
        `DistributedSampler`, and stays the user's own. A process that is alone checks
        its objects and trains with them; it also takes another model when it is called
        again.

        Args:
            objects: Any of `nn.Module`, `torch.optim.Optimizer`, `DataLoader`,
                `LRScheduler` and `GradScaler`; at least one model and one optimizer.
                Or one dict of them, with names as keys.
            clip_grad_norm: Largest L2 norm of the gradient of a step, taken over all
                workers and shards; a larger one is scaled down to it, as
                `torch.nn.utils.clip_grad_norm_` does in one process. The same on every
                worker. `None` for no clipping.
            buffers: What becomes of buffers, such as the running statistics of batch
                norm: `"mean"` over the workers, the `"leader"`'s, or `"local"` to each
                of them; or a dict of these by patterns of names as in `state_dict()`,
                with the model's name and a dot before where there are several. By
                default `mean` for running statistics and `leader` for the rest. See
                docs/buffers.md.
            overlap: Whether gradients leave while `backward()` goes on, and `step()`
                returns before the new values are there: the next forward pass waits
                for each as it reads it. The numbers are the same. See `wait`.
            compression: How to send fewer bytes: `"bf16"`, `"fp16"`, `"int8"`, `"topk"`
                or `"onebit"`, or a `Compression`; the same on every worker.
            loss: What the loss is over its batch: `"mean"`, or `"sum"`, as with
                `reduction="sum"`, and then the gradients of all workers are added up;
                the same on every worker. By default a mean. See docs/data.md.
            differential_privacy: Clips the gradient of each sample and adds noise,
                and counts what that promises for each sample of the loader; the same
                on every worker. See docs/privacy.md.
            strategy: Has workers take local steps, and what they share with the job
                after so many: `LocalSteps(every=50)`, or another one. Optimizers then
                stay the script's own and step in this process. See docs/strategies.md.
            named: Further objects, by the names that they have in the job and in
                snapshots.

        Returns:
            The same in the order of the call, a single one as it is, a dict for a
            dict: models, schedulers and scalers themselves, optimizers and loaders
            that work on the job.

        Raises:
            ConfigurationError: The objects do not go together, `clip_grad_norm` is no
                norm, or `loss` no such word.
            SchemaMismatchError: The job trains another model.
            OptimizerMismatchError: The job has another optimizer, clips otherwise, or
                has another loss or differential privacy.
            OptimizerUnsupportedError: Shards can't run an optimizer.
            UnsupportedError: A group of processes can't do that.
            StartTimeoutError: The job did not start in time.
        """
        options = PrepareOptions(
            clip_grad_norm=clip_grad_norm,
            buffers=buffers,
            overlap=overlap,
            compression=compression,
            loss=loss,
            differential_privacy=differential_privacy,
            calls=self._calls,
        )

        def work() -> Any:  # noqa: ANN401, what was given
            self._refuse_closed()
            check_overlap(overlap)
            call = NamedObjects.of(objects, named)
            is_first = self._backend.place.rank is None
            if strategy is not None or self._engine is not None:
                check_called_once(is_first=is_first)
                assert strategy is not None, "the first call has one"
                self._engine = Engine(strategy, self._backend, call, options)
                hook_script(self._engine)
                replaced = self._engine.replaced
            else:
                take = self._backend.join if is_first else self._backend.exchange
                replaced = take(call, options)
            if is_first:
                made = replaced.values()
                self._loaders = [e for e in made if isinstance(e, LeasedLoader)]
            return call.returned(replaced)

        return self._in_turn("ps.prepare()", work)

    def wait(self) -> None:
        """Returns once the newest values are in the models.

        After `prepare(overlap=True)` a step may still be under way. Whatever reads
        parameters through their modules waits by itself; call this before reading them
        through references that you hold. Without `overlap` there is nothing to wait
        for.

        Raises:
            StepTimeoutError: Some worker or shard was late.
            ClosedError: The connection is closed.
        """
        self._refuse_closed()
        self._backend.settle()

    @at_entrance
    def log(self, /, **values: float | torch.Tensor) -> None:
        """Shows values of the script with its job: `ps.log(loss=loss, accuracy=0.9)`.

        `psctl status`, the job's page and its metrics show, of each name, the mean of
        what was logged in about two seconds, over all workers. Call it as often as the
        script likes: it only adds the value up, and sends nothing. A tensor stays on
        its device, and is read about every two seconds in another thread, so that no
        step waits for the device.

        Of processes that push as one, the values of the one that leads count. Without a
        job nothing is shown. See docs/psctl.md.

        Args:
            values: Numbers, or tensors of one element, by name: at most 16 names in
                all, of up to 64 letters, digits and `_`, `-`, `.` or `/`. One that is
                no finite number is shown as unknown.

        Raises:
            ConfigurationError: A name or a value can't be logged; nothing is.
            ClosedError: The connection is closed.
        """
        self._refuse_closed()
        self._backend.work.log(values)

    @at_entrance
    def note_tokens(self, count: int) -> None:
        """Notes tokens of the batch that is trained, before the step that ends it.

        A strategy may weigh what a worker pushes by them: see `DecoupledDiLoCo`. Where
        none are noted, samples stand for them. Nothing is sent.

        Args:
            count: How many more, 0 or above.

        Raises:
            ConfigurationError: The count is none, or there is no strategy.
            ClosedError: The connection is closed.
        """
        self._refuse_closed()
        if self._engine is None:
            raise ConfigurationError(
                "note_tokens() is for a strategy that weighs by tokens: give prepare() "
                "one first, such as strategy=psworker.DecoupledDiLoCo()"
            )
        refuse_numbers(NumberRange(0, NUMBER_MAX, unit="tokens"), count=count)
        self._engine.note_tokens(count)

    @at_entrance
    def record_split(self, name: str, split: Split) -> Split:
        """Records a split of data with the job, or checks it against the recorded one.

        The first worker that names it records it. Every other one, and an evaluation
        with `SnapshotReader.split`, then has the same or an error.

        Args:
            name: Its name in the job, up to 1,024 bytes.
            split: What `psworker.data.split` returned.

        Returns:
            The same split.

        Raises:
            SplitError: The job has another one of this name; the text says how they
                differ.
        """
        self._refuse_closed()
        record = to_record(name, split)
        check_recorded(split, self._backend.record_split(record))
        return split

    @at_entrance
    def register_state(self, name: str, holder: HasState) -> None:
        """Has checkpoints take the state of an object of the script.

        Of schedulers that `prepare` is not given, scalers, random generators, counters:
        whatever the script has to have again when its job goes on from a checkpoint.
        Call it before or after `prepare`, on every worker; the state of the worker that
        is longest in the job is stored, as it is when it has gone on from its last step
        in the checkpoint. When the job goes on from there, every worker loads it, at
        once or in `prepare`. See docs/checkpoints.md.

        Args:
            name: Its name in checkpoints, up to 1,024 bytes.
            holder: An object with `state_dict()` and `load_state_dict(state)`. The
                state has tensors, `dict`, `list`, `tuple`, `None`, `bool`, `int`,
                `float`, `str` and `bytes`: 4 MiB of all that is registered.

        Raises:
            ConfigurationError: The state has something else, named in the text, or is
                too large, or the name is taken.
            UnsupportedError: This process is one of several that push as one.
            SnapshotError: The checkpoint's state can't be read.
        """
        self._refuse_closed()
        refuse_name("name of a state", name, "give it another one")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(holder, method, None)):
                raise ConfigurationError(
                    f"register_state({name!r}) takes an object with state_dict() and "
                    f"load_state_dict(), and a {type(holder).__qualname__} has no "
                    f"{method}()"
                )
        try:
            self._in_turn(
                "ps.register_state()",
                lambda: self._backend.register_state(name, holder),
            )
        except NotStorableError as error:
            raise ConfigurationError(f"register_state({name!r}): {error}") from None

    @at_entrance
    def on_rewind(self, callback: RewindCallback) -> RewindCallback:
        """Has a callback called when the job has returned to a checkpoint.

        After the loss of a shard the job goes on from its newest checkpoint in the same
        processes. Parameters, optimizers, the schedulers of `prepare` and what is
        registered are set back; what the script keeps besides, such as a log or a
        counter of its own, it can set back here. Several callbacks are called in the
        order of these calls. See docs/checkpoints.md.

        Args:
            callback: Called with a `Rewind`, which says from which clock and epoch to
                which, in the script's own thread: when it asks for its next batch, or
                begins its next step, after all else is set back. What it raises comes
                out of that call.

        Returns:
            The same callback, so that this can be a decorator.

        Raises:
            ConfigurationError: It can't be called.
            UnsupportedError: This process is one of several that push as one.
        """
        self._refuse_closed()
        if not callable(callback):
            raise ConfigurationError(
                f"on_rewind() takes a function of one argument, and a "
                f"{type(callback).__qualname__} can't be called"
            )
        self._backend.on_rewind(callback)
        return callback

    @at_entrance
    def publish(self, *what: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Makes values that the script has set by itself those of the job.

        Weights that were clamped, pruned, drawn anew, averaged or loaded: between two
        steps the job's values are on the shards, and what a script writes into its own
        copy is lost otherwise. State of optimizers stays as it is. All workers of a
        script do so at the same place, and in BSP it takes a clock of its own; where
        their values differ, those of the worker that is longest in the job count. See
        docs/optimizers.md.

        Args:
            what: Models, parts of them, parameters and buffers, or lists of these;
                all models by default.

        Raises:
            ConfigurationError: `prepare` was not called yet, or a tensor belongs to no
                prepared model.
            UnsupportedError: This process is one of several that push as one.
            OptimizerMismatchError: In BSP, another worker steps in the same clock.
            StepTimeoutError: Some worker or shard was late; calling it again goes on
                with the same values.
        """
        self._refuse_closed()
        if self._backend.place.rank is None:
            raise ConfigurationError(NOT_PREPARED_TEXT)
        if self._engine is not None:
            self._engine.publish(what)
        else:
            self._backend.publish(what)

    @at_entrance
    def close(self) -> None:
        """Leaves the job and ends all calls. More calls of it do nothing.

        Nor does one in a forked child, which has no part in the job. In a group whose
        processes push as one it is the last of them that leaves the job.

        Raises:
            ConfigurationError: Another call is under way, as a step is when a signal
                handler runs.
        """
        if self._is_closed or self._calls.is_forked:
            self._end(leaves=True)
        else:
            if self._engine is not None:
                self._calls.refuse_within("ps.close()")  # before anything is done
                try:
                    self._engine.close()
                except Exception:  # of the script's own strategy
                    self._in_turn("ps.close()", lambda: self._end(leaves=True))
                    raise
            self._in_turn("ps.close()", lambda: self._end(leaves=True))

    def _end(self, *, leaves: bool) -> None:
        if self._is_closed:
            return
        is_mine = not (self._backend.coordinator and self._calls.is_forked)
        try:
            for loader in self._loaders if is_mine and leaves else ():
                loader.tell_missed()
        finally:
            try:
                if is_mine:
                    self._backend.close(leaves=leaves)
                    if self._engine is not None:
                        self._engine.end()
            finally:
                self._is_closed = True
                atexit.unregister(self._at_exit)
                if self._metrics_port is not None and is_mine:
                    self._metrics_port.close()

    def _at_exit(self) -> None:
        """Leaves when the script ended well, since nobody called `close`."""
        if self._calls.is_forked:
            return  # a forked child has no part in the job
        error = getattr(sys, "last_value", None)
        is_over = error is None or error is self._error_at_start or hasattr(sys, "ps1")
        is_sending = self._engine is not None and self._engine.is_sending
        if is_over and (is_sending or not self._calls.is_busy):
            self.close()
        else:
            self._end(leaves=False)

    def _in_turn(self, name: str, work: Callable[[], T]) -> T:
        """Does a call of the script when no other one is under way."""
        if not self._backend.coordinator:
            return work()  # in a forked child too
        return self._calls.run(name, work)

    def _look(self) -> None:
        """Waits for the newest step, if that is possible."""
        can_wait = not (self._calls.is_busy or self._calls.is_forked)
        if can_wait and not self._is_closed:
            self._backend.settle()

    def _refuse_closed(self) -> None:
        refuse_closed(is_closed=self._is_closed)


class LocalConnection(Connection):
    """A process that trains alone: what `connect()` returns without a coordinator.

    `prepare` returns the same objects, but for loaders, which count what they hand
    out. Its optimizers take `step(weight=n)` and its loaders `set_epoch(n)` and
    `report`, as those of a job do.
    """

    def __init__(self, worker_id: str = "") -> None:
        super().__init__(Local(worker_id))


WorkerConnection = Connection
"""What `connect()` returns, by the name that scripts have used for it."""
