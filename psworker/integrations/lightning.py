"""Lightning: `Trainer(strategy=PSStrategy())` makes a process a worker of a job.

Each process runs the same script, as with `psworker run`; Lightning starts none. The
training data is split between the workers that there are when the training begins.
Validation and tests run whole in every worker.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, cast

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import _update_dataloader, extract_batch_size
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

import psworker
from pswire.checkpoint.registered_state import NotStorableError, encode_states
from psworker.connection import Connection
from psworker.errors import ConfigurationError
from psworker.integrations.weighed_steps import (
    UNSPLIT_TEXT,
    SampleCounter,
    weigh_steps,
)
from psworker.optim.optimizer import PreparedOptimizer

logger: Final = logging.getLogger("psworker")

_STATE: Final = "lightning.trainer"
"""What the trainer's progress is registered as."""


class PSStrategy(SingleDeviceStrategy):
    """Trains a `LightningModule` as a worker of a paramserver job.

    `fit` connects, joins with the module, its optimizers and schedulers, and leaves at
    its end. Automatic and manual optimization, accumulation and precision plugins work
    as ever. `trainer.is_global_zero` is true in the worker of rank 0, which alone
    writes Lightning's checkpoints. Checkpoints of the job have the progress of the
    trainer and of its callbacks, too: when the job goes on from one, so does `fit`,
    whatever its `ckpt_path` is. Workers meet in `optimizer.step()` only: `broadcast`,
    `barrier` and `reduce` are those of one process, and metrics are a worker's own.
    """

    strategy_name = "paramserver"

    def __init__(
        self,
        address: str | None = None,
        worker_id: str | None = None,
        *,
        clip_grad_norm: float | None = None,
        loss: str | None = None,
        sample_count: Callable[[Any], int] = extract_batch_size,
        device: str | torch.device | None = None,
        **limits: float,
    ) -> None:
        """Names the job; `fit` connects to it.

        Args:
            address: `HOST:PORT` of the coordinator; by default `PS_COORDINATOR`, and
                without any the process trains alone.
            worker_id: Stable name of this worker; by default `PS_WORKER_ID`.
            clip_grad_norm: Largest norm of the gradient over all workers. The
                `Trainer`'s own `gradient_clip_val` clips each worker's part by itself.
            loss: What the loss is over its batch, `"mean"` or `"sum"`.
            sample_count: Samples of a batch, which are its weight.
            device: By default the first that the accelerator has.
            limits: Time-outs of `psworker.connect`, in seconds.
        """
        super().__init__()
        self._connect: Callable[[], Connection] = lambda: psworker.connect(
            address, worker_id, **cast("dict[str, Any]", limits)
        )
        self._clip_grad_norm = clip_grad_norm
        self._loss = loss
        self._sample_count = sample_count
        self._device = device
        self._samples = SampleCounter()
        self._connection: Connection | None = None
        self._is_joined = False
        self._has_failed = False
        self._worker_count = 1
        self._last_states: list[dict[str, Any]] = []
        self._trainer: Trainer | None = None
        self._progress: _Progress | None = None

    @property
    def connection(self) -> Connection:
        """The connection of the newest `fit`.

        Raises:
            ConfigurationError: There was none yet.
        """
        if self._connection is None:
            raise ConfigurationError("there is a connection once fit() was called")
        return self._connection

    @property
    def root_device(self) -> torch.device:
        """Where the module trains."""
        if self._device is not None:
            return torch.device(self._device)
        if isinstance(self.accelerator, CUDAAccelerator):
            return torch.device("cuda", 0)
        return torch.device(
            "mps" if isinstance(self.accelerator, MPSAccelerator) else "cpu"
        )

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker has rank 0; before it has joined, always."""
        return self.global_rank == 0

    def setup(self, trainer: Trainer) -> None:
        """Joins the job, for a `fit`."""
        self._trainer = trainer
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizers, connects and joins the job with them."""
        self._is_joined = self._has_failed = False
        self._last_states = []
        self._connection = ps = self._connect()
        super().setup_optimizers(trainer)
        schedulers = [
            config.scheduler
            for config in self.lr_scheduler_configs
            if isinstance(config.scheduler, LRScheduler)
        ]
        optimizer_count = len(self.optimizers)
        self._progress = progress = _Progress(trainer, schedulers)
        ps.register_state(_STATE, progress)
        _, *prepared = ps.prepare(
            self.model,
            *self.optimizers,
            *schedulers,
            clip_grad_norm=self._clip_grad_norm,
            loss=self._loss,
        )
        for optimizer in prepared[:optimizer_count]:
            weigh_steps(optimizer, self._samples.take)
        self.optimizers = prepared[:optimizer_count]
        self._is_joined = True
        self._worker_count = ps.worker_count
        self.global_rank = ps.rank
        rank_zero_only.rank = ps.rank  # type: ignore[attr-defined]
        for optimizer in self.optimizers:
            if isinstance(optimizer, PreparedOptimizer):
                optimizer.schedules.end_wait()
        progress.begin(ps.worker_count)

    def process_dataloader(self, dataloader: object) -> object:
        """This worker's part of the training data."""
        is_training = self._trainer is not None and self._trainer.training
        if not is_training or not isinstance(dataloader, DataLoader):
            return dataloader
        ps = self.connection
        if not self._is_joined:
            if isinstance(ps, psworker.LocalConnection):
                return dataloader
            raise ConfigurationError(
                "the training data was asked for before the job has taken this worker "
                "in, as trainer.estimated_stepping_batches in configure_optimizers() "
                "does: which part is this worker's is known only then; compute the "
                "number of steps from your own figures"
            )
        if isinstance(dataloader.dataset, IterableDataset):
            if self._worker_count > 1:
                logger.warning(UNSPLIT_TEXT)
            return dataloader
        sampler: Any = dataloader.sampler
        # Of one worker, too: an epoch has to have the same order after a resume.
        if not isinstance(sampler, DistributedSampler) and not isinstance(
            ps, psworker.LocalConnection
        ):
            sampler = self._split_sampler(dataloader)
        progress = self._progress
        if progress is not None and progress.batch_count and dataloader.batch_size:
            done = progress.batch_count * dataloader.batch_size
            sampler = _WithoutDone(sampler, progress.epoch, done)
        if sampler is dataloader.sampler:
            return dataloader
        return _update_dataloader(dataloader, sampler)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Notes where the trainer is, for checkpoints of the job."""
        super().on_train_batch_start(batch, batch_idx)
        if self._progress is not None:
            self._progress.note()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, as in Lightning
        """Trains on the batch, which counts once a backward pass is made with it."""
        try:
            self._samples.begin(self._sample_count(args[0]))
        except MisconfigurationException:
            raise ConfigurationError(
                "the number of samples in a batch, which is its weight in the job, "
                "can't be seen from it: give PSStrategy(sample_count=lambda batch: ...)"
            ) from None
        output = super().training_step(*args, **kwargs)
        module = self.lightning_module
        if output is None and module is not None and module.automatic_optimization:
            self._samples.skip()  # no backward pass follows
        return output

    def backward(
        self,
        closure_loss: torch.Tensor,
        optimizer: Optimizer | None,
        *args: Any,  # noqa: ANN401, as in Lightning
        **kwargs: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Counts the batch, also where the script calls `manual_backward`."""
        self._samples.reach()
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer, for the one checkpoint that is written.

        It lives on the shards. After `fit` it is what it was when this worker left.
        """
        if not self.is_global_zero:
            return {}
        if not self._last_states:
            return super().optimizer_state(optimizer)
        return self._last_states[self.optimizers.index(_plain(optimizer))]

    def on_exception(self, exception: BaseException) -> None:
        """Lets the job count this worker as lost."""
        self._has_failed = True
        if self._connection is not None:
            self._connection.__exit__(
                type(exception), exception, exception.__traceback__
            )

    def teardown(self) -> None:
        """Leaves the job."""
        is_fit = self._trainer is not None and (
            self._trainer.state.fn == TrainerFn.FITTING
        )
        if self._is_joined and is_fit:
            self._is_joined = False
            if self.is_global_zero and not self._has_failed:
                # For a checkpoint that is saved after `fit`.
                self._last_states = [each.state_dict() for each in self.optimizers]
        if self._connection is not None and is_fit:
            if self._progress is not None and not self._has_failed:
                self._progress.note_end()
            self._connection.close()
        # Lightning moves the state of its optimizers, and theirs is on the shards.
        optimizers, self.optimizers = self.optimizers, []
        super().teardown()
        self.optimizers = optimizers

    def _split_sampler(self, dataloader: DataLoader[Any]) -> DistributedSampler[Any]:
        """This worker's part, in the user's order where that is one of their own."""
        sampler: Any = dataloader.sampler
        is_own = not isinstance(sampler, RandomSampler | SequentialSampler)
        split: type[DistributedSampler[Any]] = (
            DistributedSamplerWrapper if is_own else DistributedSampler
        )
        return split(
            sampler if is_own else dataloader.dataset,
            num_replicas=self._worker_count,
            rank=self.global_rank,
            shuffle=isinstance(sampler, RandomSampler),
        )


class _Progress:
    """Where a trainer is: what `fit` goes on with, as checkpoints of the job have it.

    Attributes:
        epoch: The one that is open.
        batch_count: Batches of it that the job has trained on before this process.
    """

    def __init__(self, trainer: Trainer, schedulers: Sequence[LRScheduler]) -> None:
        self._trainer = trainer
        self._schedulers = schedulers
        self._noted: dict[str, Any] = {}
        self._noted_step = -1
        self._loaded: dict[str, Any] = {}
        self._has_begun = False
        self._left_out: set[str] | None = None
        self._worker_count = 1
        self.epoch = 0
        self.batch_count = 0

    def state_dict(self) -> dict[str, Any]:
        """As of the newest step, once the batch after it has begun."""
        return self._noted

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `begin` is to go on with."""
        if self._has_begun:
            logger.warning(
                "the trainer goes on where it is, though the job has returned to a "
                "checkpoint: its epochs, steps and callbacks are not set back"
            )
            return
        self._loaded = state

    def begin(self, worker_count: int) -> None:
        """Has the trainer go on where the job does, before its loops run."""
        self._has_begun = True
        self._worker_count = worker_count
        state, trainer = self._loaded, self._trainer
        if not state:
            return
        self._noted = state
        loops = state["loops"]
        batches = loops["epoch_loop.batch_progress"]
        is_open = not batches["is_last_batch"]
        before = state["worker_count"]
        if before != worker_count and is_open:
            # Each has another share of the epoch now: so many of its own batches.
            done = batches["current"]["completed"] * before // worker_count
            batches["current"] = dict.fromkeys(batches["current"], done)
            logger.warning(
                "the job goes on with %d workers, and had %d: what is left of the "
                "epoch is dealt anew, and some of its samples are seen twice, or not",
                worker_count,
                before,
            )
        trainer.fit_loop.load_state_dict(loops)
        saved = {
            "callbacks": state["callbacks"],
            "pytorch-lightning_version": lightning_version,
        }
        call._call_callbacks_load_state_dict(trainer, saved)
        # The job knows their steps as of its last push; the script made more since.
        for scheduler, count in zip(
            self._schedulers, state["scheduler_steps"], strict=False
        ):
            while scheduler.last_epoch < count:
                scheduler.step()
        connector = trainer._checkpoint_connector
        if connector._loaded_checkpoint:
            logger.warning(
                "ckpt_path is not used: the job goes on from its own checkpoint, in "
                "which the trainer has made %d steps",
                trainer.global_step,
            )
            connector._loaded_checkpoint = {}
        if is_open:
            self.epoch = loops["epoch_progress"]["current"]["processed"]
            self.batch_count = batches["current"]["completed"]

    def note(self) -> None:
        """A batch begins: what was done with those before it, if there was a step."""
        if self._trainer.global_step == self._noted_step:
            return
        self._noted_step = self._trainer.global_step
        state = self._state()
        batches = state["loops"]["epoch_loop.batch_progress"]
        for counts in (batches["total"], batches["current"]):
            counts["ready"] = counts["started"] = counts["completed"]
        batches["is_last_batch"] = False
        self._noted = state

    def note_end(self) -> None:
        """The trainer has come to its end."""
        self._noted = self._state()

    def _state(self) -> dict[str, Any]:
        callbacks = call._call_callbacks_state_dict(self._trainer)
        if self._left_out is None:
            self._left_out = _not_storable(callbacks)
        return {
            "loops": copy.deepcopy(self._trainer.fit_loop.state_dict()),
            "callbacks": {
                name: state
                for name, state in callbacks.items()
                if name not in self._left_out
            },
            "scheduler_steps": [each.last_epoch for each in self._schedulers],
            "worker_count": self._worker_count,
        }


def _not_storable(callbacks: dict[str, Any]) -> set[str]:
    """Names of the callbacks whose states are not plain, with a warning for each."""
    found = set()
    for name, state in callbacks.items():
        try:
            encode_states({name: state})
        except NotStorableError as error:
            found.add(name)
            logger.warning(
                "a callback's state is in no checkpoint of the job: %s", error
            )
    return found


class _WithoutDone(Sampler[int]):
    """A sampler without the samples of the open epoch that were trained on."""

    def __init__(self, sampler: Sampler[int], open_epoch: int, count: int) -> None:
        self._sampler = sampler
        self._open_epoch = self._epoch = open_epoch
        self._count = count

    def set_epoch(self, epoch: int) -> None:
        """Has the next iteration be of this epoch."""
        self._epoch = epoch
        if isinstance(self._sampler, DistributedSampler):
            self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        done = self._count if self._epoch == self._open_epoch else 0
        return islice(iter(self._sampler), done, None)

    def __len__(self) -> int:
        # Of the whole epoch, in which the trainer counts on from what is done.
        return len(self._sampler)  # type: ignore[arg-type]


def _plain(optimizer: Optimizer) -> Optimizer:
    """The optimizer that Lightning has wrapped, or the same."""
    inner = (
        optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    )
    assert isinstance(inner, Optimizer)
    return inner
