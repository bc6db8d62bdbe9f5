"""Hugging Face `Trainer`: `PSTrainer(connection=ps, ...)` trains as a worker of a job.

The training data is split between the workers that there are when the training begins.
Evaluation runs whole in every worker, and the worker of rank 0 alone saves.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate.utils import find_batch_size
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset, Sampler
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from psworker.connection import Connection
from psworker.errors import ConfigurationError, JobEndedError
from psworker.integrations.weighed_steps import (
    UNSPLIT_TEXT,
    SampleCounter,
    weigh_steps,
)
from psworker.optim.optimizer import PreparedOptimizer

logger: Final = logging.getLogger("psworker")

_STATE: Final = "transformers.trainer"
"""What the trainer's progress is registered as."""

_LOG_LENGTH_MAX: Final = 1000
"""Newest entries of the trainer's log that go into checkpoints of the job."""


class PSCallback(TrainerCallback):
    """Adds `ps_clock`, `ps_version` and `ps_staleness` to what is logged.

    When the job is over it stops the training after the step.
    """

    def __init__(self, ps: Connection) -> None:
        self._ps = ps
        self._has_ended = False

    def end(self, error: JobEndedError) -> None:
        """Notes that the job is over."""
        logger.warning("training stops: %s", error)
        self._has_ended = True

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,  # noqa: ANN401, as transformers passes it
    ) -> None:
        """Stops the training when the job is over."""
        if self._has_ended:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,  # noqa: ANN401, as transformers passes it
    ) -> None:
        """Adds the figures, for the callbacks that come after."""
        push = self._ps.last_push
        if logs is not None and push is not None:
            figures = {
                "ps_clock": push.clock,
                "ps_version": push.version,
                "ps_staleness": push.staleness,
            }
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)


# A mixin stands before a trainer in the order of bases.
_TrainerBehind: Any = Trainer if TYPE_CHECKING else object


class PSTrainerMixin(_TrainerBehind):
    """Makes any subclass of `transformers.Trainer` a worker, put before it.

    `max_grad_norm` is that of the gradient over all workers. A step weighs as many
    samples as are behind it, or as many tokens where the loss is a mean over tokens.
    Checkpoints of the job have the trainer's progress and scheduler, too: when the job
    goes on from one, so does `train`, whatever its `resume_from_checkpoint` is.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,  # noqa: ANN401, the trainer's own
        connection: Connection,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """As the trainer's, and with the result of `psworker.connect()`."""
        self._ps = connection
        self._samples = SampleCounter()
        self._is_joined = False
        self._worker_count = 1
        self._progress = _Progress(self)
        self._loads_checkpoint = True
        self._ps_callback = PSCallback(connection)
        super().__init__(*args, **kwargs)
        # First, so that those which write logs see what it adds.
        self.callback_handler.callbacks.insert(0, self._ps_callback)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,  # noqa: ANN401, the trainer's own
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Joins the job with the model and its optimizer, and trains.

        Args:
            resume_from_checkpoint: A folder that a trainer has saved, or True for the
                last one. A job that goes on from a checkpoint of its own needs none.
            args: The trainer's own.
            kwargs: The trainer's own.

        Raises:
            ConfigurationError: The arguments ask for what a worker can't do.
        """
        self._refuse()
        folder = resume_from_checkpoint or None
        if not self._is_joined:
            if folder is True:
                # None where the job is new: nothing was saved, or the job goes on.
                folder = get_last_checkpoint(self.args.output_dir)
            if folder:
                # Before joining: the values of the model are those of a new job.
                self._load_from_checkpoint(str(folder))
            self._join()
        if self._worker_count > 1 and isinstance(self.train_dataset, IterableDataset):
            logger.warning(UNSPLIT_TEXT)
        with self._clipped_by_job(), self._progress.folder() as own:
            if own and folder:
                logger.warning(
                    "resume_from_checkpoint is not used: the job goes on from its own "
                    "checkpoint"
                )
            return super().train(own or folder, *args, **kwargs)

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Counts the batch and trains on it."""
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            # Of all batches of the step, the same with each.
            self._samples.put(float(num_items_in_batch))
        else:
            self._samples.add(find_batch_size(inputs) or 1)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def is_world_process_zero(self) -> bool:
        """Whether this worker has rank 0; before it has joined, always."""
        return not self._is_joined or self._ps.rank == 0

    def save_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, the trainer's own
        """Saves the model, in the worker of rank 0."""
        if self.is_world_process_zero():
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        if self.is_world_process_zero():
            super()._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        if not self._is_joined:  # then the job's values count
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._progress.load_scheduler():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:  # noqa: ANN401
        data = self.train_dataset if train_dataset is None else train_dataset
        if not self._is_joined or self._worker_count == 1:
            return super()._get_train_sampler(train_dataset)
        strategy = self.args.train_sampling_strategy
        if strategy not in ("random", "sequential"):
            raise ConfigurationError(
                "the training data can't be split between the workers with "
                f"train_sampling_strategy={strategy!r}: it must be 'random' or "
                "'sequential'"
            )
        seed = (
            self.args.data_seed if self.args.data_seed is not None else self.args.seed
        )
        return DistributedSampler(
            data,
            num_replicas=self._worker_count,
            rank=self._ps.rank,
            shuffle=strategy == "random",
            seed=seed,
        )

    def _refuse(self) -> None:
        args = self.args
        if args.world_size > 1 or args.n_gpu > 1:
            raise ConfigurationError(
                "a worker trains in one process on one device: start one for each with "
                "`psworker run --nproc N`, not with torchrun or accelerate"
            )
        if args.fp16:
            raise ConfigurationError(
                "fp16=True scales the loss by a scaler of accelerate's own, which does "
                "not reach the shards: use bf16=True"
            )

    def _join(self) -> None:
        self.create_optimizer()
        objects = [self.model, self.optimizer]
        if self.lr_scheduler is not None:
            objects.append(self.lr_scheduler)
        self._ps.register_state(_STATE, self._progress)
        norm = self.args.max_grad_norm
        self.optimizer = self._ps.prepare(*objects, clip_grad_norm=norm or None)[1]
        weigh_steps(self.optimizer, self._samples.take, self._ps_callback.end)
        if isinstance(self.optimizer, PreparedOptimizer):
            # accelerate would wrap it, to scale losses and to place its state.
            self.optimizer._is_accelerate_prepared = True  # type: ignore[attr-defined]
            self.optimizer.step_was_skipped = False  # type: ignore[attr-defined]
        self._worker_count = self._ps.worker_count
        self._is_joined = True

    @contextmanager
    def _clipped_by_job(self) -> Iterator[None]:
        """Keeps the trainer from clipping this worker's part by itself as well."""
        norm, self.args.max_grad_norm = self.args.max_grad_norm, 0.0
        try:
            yield
        finally:
            self.args.max_grad_norm = norm


class _Progress:
    """Where a trainer is: what `train` goes on with, as checkpoints of the job have it.

    As of its newest step, once the next one begins.
    """

    def __init__(self, trainer: Any) -> None:  # noqa: ANN401, a mixin's
        self._trainer = trainer
        self._loaded: dict[str, Any] = {}
        self._has_begun = False
        self._log = 0, "[]"

    def state_dict(self) -> dict[str, Any]:
        """The trainer's state as it saves it, its log apart, and the scheduler's."""
        trainer = self._trainer
        log = trainer.state.log_history
        if len(log) != self._log[0]:  # this is called at each step
            self._log = len(log), json.dumps(log[-_LOG_LENGTH_MAX:])
        state = dataclasses.replace(trainer.state, log_history=[])
        handlers = [*trainer.callback_handler.callbacks, trainer.control]
        state.stateful_callbacks = {
            type(each).__name__: each.state()
            for each in handlers
            if isinstance(each, ExportableState)
        }
        scheduler = trainer.lr_scheduler
        return {
            "state": json.dumps(dataclasses.asdict(state)),
            "log": self._log[1],
            "scheduler": None if scheduler is None else scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `folder` is to have."""
        if self._has_begun:
            logger.warning(
                "the trainer goes on where it is, though the job has returned to a "
                "checkpoint: its steps, scheduler and callbacks are not set back"
            )
            return
        self._loaded = state

    @contextmanager
    def folder(self) -> Iterator[str]:
        """A folder that `train` goes on with, empty where the job is new."""
        self._has_begun = True
        if not self._loaded:
            yield ""
            return
        with TemporaryDirectory(prefix="paramserver-trainer-") as folder:
            state = json.loads(self._loaded["state"])
            state["log_history"] = json.loads(self._loaded["log"])
            text = json.dumps(state)
            Path(folder, TRAINER_STATE_NAME).write_text(text, encoding="utf-8")
            yield folder
        self._loaded = {}

    def load_scheduler(self) -> bool:
        """Sets the scheduler to the loaded state, if there is any."""
        if not self._loaded:
            return False
        state, trainer = self._loaded["scheduler"], self._trainer
        if state is not None:
            scheduler = trainer.lr_scheduler
            scheduler.load_state_dict(state)
            rates = scheduler.get_last_lr()
            for group, rate in zip(trainer.optimizer.param_groups, rates, strict=False):
                group["lr"] = rate
        return True


class PSTrainer(PSTrainerMixin, Trainer):
    """`transformers.Trainer` as a worker of a paramserver job."""
