"""What `test_integrations` has `PSTrainer` do and refuse."""

import os
import signal
import sys
import time
from typing import Any, ClassVar

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import psworker
from pswire.checkpoint.folder import CheckpointFolder
from psworker.integrations.transformers import PSTrainer


def refuse(folder: str) -> None:
    """Tries one after the other, and waits."""
    config = BertConfig(
        vocab_size=2,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=3,
    )
    torch.manual_seed(0)
    with psworker.connect() as ps:
        trainer = PSTrainer(
            connection=ps,
            model=BertForSequenceClassification(config),
            args=TrainingArguments(
                folder,
                train_sampling_strategy="group_by_length",
                report_to="none",
                use_cpu=True,
            ),
            train_dataset=[
                {"input_ids": torch.zeros(3).long(), "labels": torch.tensor(0)}
            ]
            * 8,
        )
        for name in ("fp16", "_n_gpu", ""):
            if name:
                setattr(trainer.args, name, 2)
            try:
                trainer.train()
            except psworker.ConfigurationError as error:
                print("refused:", error, flush=True)
            if name:
                setattr(trainer.args, name, 0)
        signal.pause()  # Until it is killed: the other one shall not be alone.


def arguments(folder: str, **named: Any) -> TrainingArguments:  # noqa: ANN401
    return TrainingArguments(
        folder,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        per_device_train_batch_size=2,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        **named,
    )


def new_language_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16,
        n_positions=6,
        n_embd=8,
        n_layer=1,
        n_head=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def texts() -> list[dict[str, torch.Tensor]]:
    """Samples of which each has another number of tokens to predict."""
    found = []
    for number in range(12):
        ids = (torch.arange(6) * (number + 1)) % 16
        labels = ids.clone()
        labels[: number % 5] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def log(folder: str) -> None:
    """In bf16, beside the plain trainer; says what stands in the logs."""
    models = {name: new_language_model() for name in ("plain", "ours", "float32")}
    for name in ("plain", "float32"):
        given = arguments(folder, max_steps=4, bf16=name == "plain")
        Trainer(model=models[name], args=given, train_dataset=texts()).train()
    with psworker.connect() as ps:
        given = arguments(folder, max_steps=4, bf16=True)
        trainer = PSTrainer(
            connection=ps, model=models["ours"], args=given, train_dataset=texts()
        )
        trainer.train()
    far = {name: distance(models["plain"], models[name]) for name in models}
    print("bf16", far["ours"] <= 1e-6 < 1e-5 < far["float32"], far, flush=True)
    names = ("ps_clock", "ps_version", "ps_staleness")
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    print("logs", [[entry[name] for name in names] for entry in logged], flush=True)


def distance(ours: torch.nn.Module, theirs: torch.nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


class Counting(PSTrainer):
    """Notes how many tokens the trainer takes the mean over."""

    counts: ClassVar[list[float]] = []

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401
        count = named.get("num_items_in_batch", given[-1])
        self.counts.append(float(count))
        return super().training_step(*given, **named)


class Watching(TrainerCallback):
    """Notes what steps weigh, and says when some have been made."""

    def __init__(self, trainer: Counting) -> None:
        self.weights: list[float] = []
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        steps = self._trainer.optimizer._steps
        step = steps.step

        def noted(wanted: Any) -> Any:  # noqa: ANN401
            self.weights.append(wanted.weight)
            if len(self.weights) == 5:
                raise psworker.JobEndedError("the job is over")  # as shards would say
            return step(wanted)

        steps.step = noted

    def on_step_end(self, args: object, state: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        if state.global_step == 3:
            counts = self._trainer.counts
            print("weights", self.weights == counts[1::2], counts[::2], flush=True)


def tokens(folder: str) -> None:
    """Two batches a step, whose loss is a mean over tokens; the fifth ends the job."""
    with psworker.connect() as ps:
        given = arguments(folder, max_steps=10**6, gradient_accumulation_steps=2)
        trainer = Counting(
            connection=ps,
            model=new_language_model(),
            args=given,
            train_dataset=texts(),
        )
        trainer.add_callback(Watching(trainer))
        trainer.train()
        print("stopped", trainer.state.global_step, ps.clock, flush=True)


class Killed(TrainerCallback):
    """Dies once the job has a checkpoint."""

    def __init__(self, url: str) -> None:
        self._url = url

    def on_step_end(self, args: object, state: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        if state.global_step >= 7:
            # A checkpoint of this very step is complete once the trainer has gone on.
            folder, until_s = CheckpointFolder(self._url), time.monotonic() + 1
            while time.monotonic() < until_s:
                if folder.newest_good().manifest is not None:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.02)


def train_epochs(
    folder: str,
    epoch_count: int,
    resume: str | bool = False,
    *callbacks: TrainerCallback,
    connection: psworker.Connection | None = None,
) -> Trainer:
    """The same data and first values each time; saves every 4 steps."""
    given = arguments(folder)
    given.set_save(strategy="steps", steps=4, total_limit=2)
    given.set_optimizer(name="adamw_torch", learning_rate=0.01)
    given.set_lr_scheduler(
        name="constant_with_warmup", num_epochs=epoch_count, warmup_steps=8
    )
    kind: Any = Trainer
    named: dict[str, Any] = {}
    if connection is not None:
        kind, named = PSTrainer, {"connection": connection}
    trainer: Trainer = kind(
        model=new_language_model(),
        args=given,
        train_dataset=texts(),
        callbacks=list(callbacks),
        **named,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Trainer) -> list[list[float]]:
    """Step, loss and rate of each step, also of those before a resume."""
    names = ("step", "loss", "learning_rate")
    log = trainer.state.log_history
    return [[entry[name] for name in names] for entry in log if "loss" in entry]


def is_close(ours: Trainer, theirs: Trainer) -> bool:
    mine, others = torch.tensor(logged(ours)), torch.tensor(logged(theirs))
    return torch.allclose(mine, others[: len(mine)], rtol=1e-4, atol=1e-7)


def train_until_killed(url: str, folder: str) -> None:
    with psworker.connect() as ps:
        train_epochs(folder, 3, False, Killed(url), connection=ps)


def go_on(folder: str) -> None:
    """With the switch of Transformers, which has a folder of its own."""
    whole = train_epochs(f"{folder}-whole", 3)
    with psworker.connect() as ps:
        trainer = train_epochs(folder, 3, True, connection=ps)
        print("went on", ps.clock, len(logged(trainer)), flush=True)
    print("ended", trainer.state.global_step, is_close(trainer, whole), flush=True)


def exchange(folder: str) -> None:
    """Folders of Transformers' own: plain, then a job, then plain again."""
    whole = train_epochs(f"{folder}-whole", 3)
    train_epochs(folder, 1)
    with psworker.connect() as ps:
        ours = train_epochs(folder, 2, True, connection=ps)
        print("from plain", ps.clock, is_close(ours, whole), flush=True)
    again = train_epochs(folder, 3, True)
    print("to plain", len(logged(again)), is_close(again, whole), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["refuse", folder]:
            refuse(folder)
        case ["log", folder]:
            log(folder)
        case ["tokens", folder]:
            tokens(folder)
        case ["killed", url, folder]:
            train_until_killed(url, folder)
        case ["goes on", folder]:
            go_on(folder)
        case ["exchange", folder]:
            exchange(folder)
