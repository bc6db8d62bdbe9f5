"""Training scripts that change, skip or share what `overlap` sends ahead."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from psworker import Compression

SEED: Final = 20261129
STEP_COUNT: Final = 6

Optimizer = torch.optim.Optimizer
Objects = tuple[list[nn.Module], list[Optimizer]]


class Script:
    """One process's part: how it builds what it trains, and what a step does."""

    prepare: ClassVar[dict[str, Any]] = {}

    def models(self) -> list[nn.Module]:
        return [
            nn.Sequential(
                nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 9)
            )
        ]

    def optimizers(self, models: list[nn.Module]) -> list[Optimizer]:
        return [torch.optim.Adam(each.parameters(), lr=0.01) for each in models]

    def build(self) -> Objects:
        torch.manual_seed(SEED)
        models = self.models()
        return models, self.optimizers(models)

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(SEED + 100 * step + rank)
        return (
            torch.randn(8, 12, generator=generator),
            torch.randn(8, 9, generator=generator),
        )

    def run(self, models: list[Any], optimizers: list[Any], rank: int) -> None:
        for step in range(STEP_COUNT):
            self.step(models, optimizers, step, rank)

    def step(
        self, models: list[Any], optimizers: list[Any], step: int, rank: int
    ) -> None:
        self.backward(models[0], step, rank)
        self.before_step(models[0], step)
        optimizers[0].step()
        optimizers[0].zero_grad()

    def backward(self, model: Any, step: int, rank: int) -> None:  # noqa: ANN401
        inputs, targets = self.batch(step, rank)
        nn.functional.mse_loss(model(inputs), targets).backward()

    def before_step(self, model: nn.Module, step: int) -> None:
        """What the script does to its gradients."""


class Sgd(Script):
    def optimizers(self, models: list[nn.Module]) -> list[Optimizer]:
        return [torch.optim.SGD(models[0].parameters(), lr=0.05, momentum=0.9)]


class AdamW(Script):
    def optimizers(self, models: list[nn.Module]) -> list[Optimizer]:
        first, *others = models[0].parameters()
        groups: list[dict[str, Any]] = [
            {"params": [first], "lr": 0.02},
            {"params": others},
        ]
        return [torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)]


class Clipped(Script):
    def before_step(self, model: nn.Module, step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05 if step % 2 else 1e6)


class ClippedOnShards(Script):
    prepare: ClassVar[dict[str, Any]] = {"clip_grad_norm": 0.05}


class Accumulated(Script):
    def step(
        self, models: list[Any], optimizers: list[Any], step: int, rank: int
    ) -> None:
        for part in range(3):
            self.backward(models[0], 10 * step + part, rank)
        optimizers[0].step()
        optimizers[0].zero_grad()


class AccumulatedUnevenly(Script):
    def step(
        self, models: list[Any], optimizers: list[Any], step: int, rank: int
    ) -> None:
        for part in range(1 + step % 3):
            self.backward(models[0], 10 * step + part, rank)
        optimizers[0].step()
        optimizers[0].zero_grad()


class EditedBehindAutograd(Script):
    def before_step(self, model: nn.Module, step: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            if (step + number) % 2:
                parameter.grad.data.mul_(0.5)
            elif step % 3 == 2:
                parameter.grad = None


class Zeroed(Script):
    def before_step(self, model: nn.Module, step: int) -> None:
        if step % 3 == 1:
            model.zero_grad(set_to_none=step % 2 == 0)


class Frozen(Script):
    def models(self) -> list[nn.Module]:
        models = super().models()
        for parameter in next(models[0].children()).parameters():
            parameter.requires_grad_(False)
        return models

    def before_step(self, model: nn.Module, step: int) -> None:
        if step == STEP_COUNT // 2:
            for parameter in model.parameters():
                parameter.requires_grad_(True)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 9)
        self.second = nn.Linear(12, 9)
        self.never = nn.Linear(9, 9)
        self.turn = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        outputs: torch.Tensor = self.first(inputs)
        return outputs if self.turn % 2 else outputs + self.second(inputs)


class Unused(Script):
    def models(self) -> list[nn.Module]:
        return [Branching()]


class Shared(nn.Module):
    """A layer that runs twice, one that is read without a call, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 8)
        self.twice = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.silent = nn.Linear(8, 8)
        self.leave = nn.Linear(8, 9)
        self.tied = nn.Linear(8, 12)
        self.tied.weight = nn.Parameter(self.enter.weight.detach().t().clone().t())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.twice(self.twice(self.enter(inputs)).tanh())
        hidden = hidden[None]
        hidden = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.recurrent(hidden)[0][0]
        hidden = nn.functional.linear(hidden, self.silent.weight, self.silent.bias)
        hidden = hidden + self.enter(self.tied(hidden))
        outputs: torch.Tensor = self.leave(hidden)
        return outputs


class Sharing(Script):
    def models(self) -> list[nn.Module]:
        model = Shared()
        model.tied.weight = nn.Parameter(torch.randn(8, 12).t())  # has gaps
        return [model]


class Checkpointed(Script):
    is_reentrant = False

    def backward(self, model: Any, step: int, rank: int) -> None:  # noqa: ANN401
        inputs, targets = self.batch(step, rank)
        inputs.requires_grad_(True)
        for layer in model:
            inputs = checkpoint(layer, inputs, use_reentrant=self.is_reentrant)
        nn.functional.mse_loss(inputs, targets).backward()


class CheckpointedReentrant(Checkpointed):
    is_reentrant = True


class Gan(Script):
    def models(self) -> list[nn.Module]:
        generator = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 9))
        critic = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1))
        return [generator, critic]

    def step(
        self, models: list[Any], optimizers: list[Any], step: int, rank: int
    ) -> None:
        generator, critic = models
        noise, real = self.batch(step, rank)
        made = generator(noise)
        optimizers[1].zero_grad()
        (critic(made.detach()).mean() - critic(real).mean()).backward()
        optimizers[1].step()
        if step % 3 == 2:
            return
        optimizers[0].zero_grad()
        (-critic(made)).mean().backward()
        optimizers[0].step()


class Scaled(Script):
    def run(self, models: list[Any], optimizers: list[Any], rank: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(STEP_COUNT):
            inputs, targets = self.batch(step, rank)
            loss = nn.functional.mse_loss(models[0](inputs), targets)
            scaler.scale(loss).backward()
            if step == 2:
                next(models[0].parameters()).grad[0, 0] = float("inf")
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[0].zero_grad()


class ScaledAndCompressed(Script):
    """Gradients of float16 keep their loss scale, and the residuals of topk have none.

    What went ahead of a step was encoded before that told the scale.
    """

    prepare: ClassVar[dict[str, Any]] = {
        "compression": Compression("topk", None, ratio=0.1)
    }

    def models(self) -> list[nn.Module]:
        return [each.half() for each in super().models()]

    def optimizers(self, models: list[nn.Module]) -> list[Optimizer]:
        return [torch.optim.SGD(models[0].parameters(), lr=0.05)]

    def run(self, models: list[Any], optimizers: list[Any], rank: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(STEP_COUNT):
            inputs, targets = self.batch(step, rank)
            loss = nn.functional.mse_loss(models[0](inputs.half()).float(), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[0].zero_grad()


class Normalized(Script):
    """With buffers that each forward pass changes, and one that never does."""

    def models(self) -> list[nn.Module]:
        model = nn.Sequential(
            nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 9)
        )
        model.register_buffer("constant", torch.ones(3))
        return [model]

    def run(self, models: list[Any], optimizers: list[Any], rank: int) -> None:
        super().run(models, optimizers, rank)
        self.total = models[0].state_dict()["1.running_mean"].sum()


class Looking(Script):
    """A table of which each step touches a few rows, beside layers."""

    def models(self) -> list[nn.Module]:
        table = nn.Embedding(40, 12, sparse=True)
        return [nn.Sequential(table, nn.Flatten(), nn.Linear(24, 9))]

    def optimizers(self, models: list[nn.Module]) -> list[Optimizer]:
        return [torch.optim.SGD(models[0].parameters(), lr=0.5)]

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().batch(step, rank)
        return (inputs[:, :2].abs() * 20).long() % 40, targets


class Inspecting(Script):
    """Reads values between steps, in every way that is seen."""

    def run(self, models: list[Any], optimizers: list[Any], rank: int) -> None:
        model = models[0]
        total = torch.zeros(())
        for step in range(STEP_COUNT):
            self.step(models, optimizers, step, rank)
            if step % 4 == 0:
                total = total + model.state_dict()["3.weight"].sum()
            elif step % 4 == 3:
                held = optimizers[0].param_groups[0]["params"]
                total = total + sum(p.detach().sum() for p in held)
            elif step % 4 == 1:
                total = total + sum(p.detach().sum() for p in model.parameters())
            else:
                total = total + model[2].weight.detach().sum()
        with torch.no_grad():  # so that a sum of old values is seen
            self.total = total


class Copying(Script):
    """Copies the model right after a step, as for an average, or saves all of it."""

    def run(self, models: list[Any], optimizers: list[Any], rank: int) -> None:
        total = torch.zeros(())
        for step in range(STEP_COUNT):
            self.step(models, optimizers, step, rank)
            model = (
                copy.deepcopy(models[0])
                if step % 2
                else pickle.loads(pickle.dumps(models[0]))
            )
            total = total + sum(p.detach().sum() for p in model.parameters())
        self.total = total


class Compiled(Script):
    """The script compiles what calls the model and the optimizer, not the model."""

    def run(self, models: list[Any], optimizers: list[Any], rank: int) -> None:
        @torch.compile(backend="eager")
        def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(models[0](inputs), targets)

        @torch.compile(backend="eager")
        def update() -> None:
            optimizers[0].step()
            optimizers[0].zero_grad()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # dynamo's own look at `.grad`
            for step in range(STEP_COUNT):
                loss_of(*self.batch(step, rank)).backward()
                update()


class WithoutElements(Script):
    """The last parameters have none: they are in no chunk."""

    def models(self) -> list[nn.Module]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: nothing to initialize
            return [nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 0))]

    def backward(self, model: Any, step: int, rank: int) -> None:  # noqa: ANN401
        inputs, targets = self.batch(step, rank)
        hidden = model[0](inputs)
        nothing = model[1](hidden).sum()
        (nn.functional.mse_loss(hidden, targets) + nothing).backward()


SCRIPTS: Final[list[Callable[[], Script]]] = [
    Sgd,
    AdamW,
    Clipped,
    ClippedOnShards,
    Accumulated,
    AccumulatedUnevenly,
    EditedBehindAutograd,
    Zeroed,
    Frozen,
    Unused,
    Sharing,
    Checkpointed,
    CheckpointedReentrant,
    Gan,
    Scaled,
    ScaledAndCompressed,
    Normalized,
    Looking,
    Inspecting,
    Compiled,  # by one worker: dynamo takes turns with itself in threads
    Copying,
    WithoutElements,
]
