"""What `test_integrations` has Lightning do in a job of one worker."""

import copy
import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
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

    if sys.argv[1] == "manual":
        compare(Manual, "w0")
    elif sys.argv[1] == "bf16":
        in_bf16()
    else:
        main()
