"""Jobs in which some workers push anything: rules that bear them, and limits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import psworker
from pswire.aggregation import Aggregation, BadGradientPolicy
from tests.integration.job import Job, connect, run_workers

SEED: Final = 20261130
WORKERS: Final = tuple(f"w{index}" for index in range(7))
BAD: Final = ("w0", "w3")
"""The longest worker, whose settings count in other jobs, and another one."""


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, of which each worker has its share."""

    inputs: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def load(cls) -> "Digits":
        datasets = pytest.importorskip("sklearn.datasets")
        data, labels = datasets.load_digits(return_X_y=True)
        order = torch.randperm(
            len(labels), generator=torch.Generator().manual_seed(SEED)
        )
        inputs = torch.tensor(data, dtype=torch.float32)[order] / 16
        return cls(inputs, torch.tensor(labels)[order])

    def batch(self, worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(32) * len(WORKERS) + worker + 32 * 7 * (step % 6)
        return self.inputs[places], self.labels[places]

    def accuracy(self, model: nn.Module) -> float:
        with torch.no_grad():
            found = model(self.inputs[1400:]).argmax(dim=1)
        return float((found == self.labels[1400:]).float().mean())


DIGITS: Final = Digits.load()


def new_model() -> nn.Module:
    generator = torch.Generator().manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.Linear(24, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * parameter.shape[1] ** -0.5)
    return model


Attack = Callable[[nn.Module, torch.optim.Optimizer], None]


def sign_flip(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(-10.0)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Not its gradient alone: also its running statistics and its learning rate."""
    sign_flip(model, optimizer)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(1e30)
    optimizer.param_groups[0]["lr"] = 1e6


def train(
    job: Job,
    worker_id: str,
    *,
    attack: Attack | None = None,
    weight: float = 32,
    step_count: int = 15,
    **options: Any,  # noqa: ANN401
) -> tuple[nn.Module, list[psworker.PushResult]]:
    model = new_model()
    results = []
    with connect(job, worker_id) as ps:
        model, optimizer = ps.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.5), **options
        )
        for step in range(step_count):
            optimizer.zero_grad()
            inputs, labels = DIGITS.batch(WORKERS.index(worker_id), step)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if attack is not None:
                attack(model, optimizer)
            optimizer.step(weight=weight)
            assert ps.last_push is not None
            results.append(ps.last_push)
    return model, results


def accuracy_under(
    folder: Path,
    rule: str,
    attack: Attack | None,
    *,
    weight: float = 32,
    **options: Any,  # noqa: ANN401
) -> float:
    """Of the model that the last worker ends with."""
    aggregation = Aggregation.parse(rule)
    policy = (
        BadGradientPolicy.REJECT if aggregation.is_robust else BadGradientPolicy.SKIP
    )
    with Job(
        folder,
        workers_min=len(WORKERS),
        aggregation=aggregation,
        bad_gradient_policy=policy,
    ) as job:

        def work(worker_id: str) -> nn.Module:
            if attack is None or worker_id not in BAD:
                return train(job, worker_id, **options)[0]
            return train(job, worker_id, attack=attack, weight=weight, **options)[0]

        results = run_workers(dict.fromkeys(WORKERS, work))
    return DIGITS.accuracy(results["w6"].eval())


def test_bad_workers_ruin_the_mean_and_no_other_rule(tmp_path: Path) -> None:
    clean = accuracy_under(tmp_path / "clean", "mean", None)
    assert clean > 0.85
    assert accuracy_under(tmp_path / "mean", "mean", sign_flip) < 0.5
    found = {
        rule: accuracy_under(tmp_path / rule.replace(":", "-"), rule, sign_flip)
        for rule in ("median", "trimmed-mean:0.3", "multi-krum:f=2")
    }
    print(f"seed {SEED}: clean {clean:.3f}, {found}")
    assert min(found.values()) > clean - 0.1


@pytest.mark.parametrize("rule", ["median", "multi-krum:f=2"])
def test_weights_settings_and_buffers_of_bad_workers_do_no_harm(
    rule: str, tmp_path: Path
) -> None:
    found = accuracy_under(tmp_path, rule, everything, weight=1e30)
    assert found > 0.8


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("median", {"compression": "int8"}),
        ("median", {"clip_grad_norm": 5.0}),
        ("median", {"overlap": True}),
        ("krum:f=2", {"compression": "topk"}),
        ("multi-krum:f=2", {"clip_grad_norm": 5.0, "overlap": True}),
    ],
)
def test_rules_go_with_what_else_prepare_offers(
    rule: str, options: dict[str, Any], tmp_path: Path
) -> None:
    assert accuracy_under(tmp_path, rule, sign_flip, **options) > 0.7
