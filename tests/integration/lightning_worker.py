"""What `test_integrations` has Lightning do in a job of one worker."""

import copy
import logging
import os
import signal
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.checkpoint.folder import CheckpointFolder
from psworker.integrations.lightning import PSStrategy

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.second(self.first(x).tanh()).square().mean()
        return loss

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Manual(Regression):
    """Two optimizers, stepped by hand and in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:  # type: ignore[override]
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        for optimizer in optimizers:
            optimizer.zero_grad()
            self.manual_backward(self(batch[0]))
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [
            torch.optim.SGD(each.parameters(), lr=0.05)
            for each in (self.first, self.second)
        ]


class Counting(Regression):
    """Asks for the number of steps before the job can tell it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Odd(Regression):
    """Its batches are no tensors."""

    def training_step(self, batch: object, index: int) -> torch.Tensor:  # type: ignore[override]
        return self(torch.ones(1, 3))


def fit(
    model: pl.LightningModule,
    strategy: PSStrategy | str,
    accumulated: int = 1,
    precision: Any = None,  # noqa: ANN401, of the trainer's many kinds
) -> pl.Trainer:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 3, generator=generator))
    collate = (lambda _: object()) if isinstance(model, Odd) else None
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulated,
        precision=precision,
    )
    trainer.fit(model, DataLoader(data, batch_size=4, collate_fn=collate))
    return trainer


def compare(kind: type[Regression], worker_id: str, accumulated: int = 1) -> None:
    torch.manual_seed(0)
    plain = kind()
    ours = copy.deepcopy(plain)
    fit(plain, "auto", accumulated)
    strategy = PSStrategy(worker_id=worker_id)
    trainer = fit(ours, strategy, accumulated)
    worst = max(
        float((a - b).abs().max() / b.abs().max())
        for a, b in zip(
            ours.state_dict().values(), plain.state_dict().values(), strict=True
        )
    )
    clock = strategy.connection.clock
    print(kind.__name__, trainer.global_step, clock, worst <= 1e-6, flush=True)


def in_bf16() -> None:
    """As the trainer does alone, which is not what float32 gives."""
    torch.manual_seed(0)
    plain = Regression()
    ours, exact = copy.deepcopy(plain), copy.deepcopy(plain)
    fit(exact, "auto")
    fit(plain, "auto", precision="bf16-mixed")
    fit(ours, PSStrategy(worker_id="w0"), precision="bf16-mixed")
    weights = [each.first.weight.detach() for each in (ours, plain, exact)]
    near, far = (float((weights[1] - weights[i]).abs().max()) for i in (0, 2))
    print("bf16", near <= 1e-6 < 1e-5 < far, near, far, flush=True)


def refused(model: Regression, worker_id: str) -> None:
    try:
        fit(model, PSStrategy(worker_id=worker_id))
    except psworker.ConfigurationError as error:
        print("refused:", error, flush=True)


class Scheduled(Regression):
    """Notes its losses, and what its rate is."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[int, tuple[float, float]] = {}

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        assert self.trainer.optimizers is not None
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.losses[self.trainer.global_step] = (loss.item(), rate)
        return loss

    def configure_optimizers(self) -> Any:  # noqa: ANN401, of the trainer's many kinds
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Killed(pl.Callback):
    """Counts batches, and dies once the job has a checkpoint."""

    def __init__(self, url: str = "") -> None:
        self.count = 0
        self._url = url

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:  # noqa: ANN401
        self.count += 1
        if self._url and trainer.global_step >= 7:
            # A checkpoint of this very step is complete once the trainer has gone on.
            folder, until_s = CheckpointFolder(self._url), time.monotonic() + 1
            while time.monotonic() < until_s:
                if folder.newest_good().manifest is not None:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.02)


def fit_epochs(
    strategy: PSStrategy | str,
    epoch_count: int,
    ckpt_path: str | None = None,
    *callbacks: pl.Callback,
) -> pl.Trainer:
    """The same data and first values each time."""
    torch.manual_seed(0)
    model = Scheduled()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 3, generator=generator))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=epoch_count,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    return trainer


def losses_of(trainer: pl.Trainer) -> dict[int, tuple[float, float]]:
    model = trainer.lightning_module
    assert isinstance(model, Scheduled)
    return model.losses


def is_close(ours: pl.Trainer, theirs: pl.Trainer) -> bool:
    """Whether the losses and rates of all steps that ours made are theirs."""
    mine, others = losses_of(ours), losses_of(theirs)
    return bool(mine) and all(
        torch.allclose(torch.tensor(mine[step]), torch.tensor(others[step]), rtol=1e-5)
        for step in mine
    )


def train_until_killed(url: str, folder: str) -> None:
    saver = ModelCheckpoint(folder, save_last=True)
    fit_epochs(PSStrategy(), 3, None, Killed(url), saver)


def go_on(folder: str) -> None:
    """With the switch of Lightning, which has a file of an epoch's end."""
    whole = fit_epochs("auto", 3)
    killed = Killed()
    saver = ModelCheckpoint(folder, save_last=True)
    trainer = fit_epochs(PSStrategy(), 3, "last", killed, saver)
    first = min(losses_of(trainer))
    print("went on", 0 < first < 18, is_close(trainer, whole), flush=True)
    print("ended", trainer.global_step, trainer.current_epoch, killed.count, flush=True)


def report(title: str, ours: pl.Trainer, whole: pl.Trainer) -> None:
    """Says which steps were made, and whether they are those of the whole."""
    steps = losses_of(ours)
    print(title, min(steps), max(steps), is_close(ours, whole), flush=True)


def exchange(folder: str) -> None:
    """Files of Lightning's own: plain, then a job, then plain again."""
    whole = fit_epochs("auto", 3)
    plain = fit_epochs("auto", 1)
    plain.save_checkpoint(f"{folder}/plain.ckpt")
    ours = fit_epochs(PSStrategy(), 2, f"{folder}/plain.ckpt")
    print(
        "from plain", *sorted(losses_of(ours))[::5], is_close(ours, whole), flush=True
    )
    ours.save_checkpoint(f"{folder}/ours.ckpt")
    again = fit_epochs("auto", 3, f"{folder}/ours.ckpt")
    print(
        "to plain", *sorted(losses_of(again))[::5], is_close(again, whole), flush=True
    )


def main() -> None:
    """Each of them, in a job of its own kind."""
    try:
        _ = PSStrategy().connection
    except psworker.ConfigurationError as error:
        print("refused:", error, flush=True)
    refused(Counting(), "w0")
    compare(Regression, "w1", accumulated=2)
    refused(Odd(), "w2")


if __name__ == "__main__":
    import sys

    match sys.argv[1:]:
        case ["manual"]:
            compare(Manual, "w0")
        case ["bf16"]:
            in_bf16()
        case ["killed", url, folder]:
            train_until_killed(url, folder)
        case ["goes on", folder]:
            go_on(folder)
        case ["exchange", folder]:
            exchange(folder)
        case _:
            main()
