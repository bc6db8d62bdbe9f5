"""Jobs in which some workers push anything: rules that tolerate them, and limits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import psworker
from psctl.compare.attacks import Attack as Flip
from psserver.coordinator.rpc.status_report import status_message
from psserver.edge.monotonic import now_ms
from pswire.aggregation import Aggregation, BadGradientPolicy
from pswire.limits import PUSH_WEIGHT_MAX
from pswire.membership import Mode, ModeTerms, StepAtomicity
from pswire.reasons import Refusal
from tests.integration.job import WAIT_TIMEOUT_S, Job, connect, run_workers

SEED: Final = 20261130
WORKERS: Final = tuple(f"w{index}" for index in range(7))
BAD: Final = ("w0", "w3")
"""The longest worker, whose settings count in other jobs, and another one."""

LATE: Final = "w1"
"""In a job with backup workers, each time."""


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
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.zero_()
    return model


Attack = Callable[[nn.Module, torch.optim.Optimizer], None]


def sign_flip(model: nn.Module, _: torch.optim.Optimizer) -> None:
    Flip("sign-flip").carry_out(each.grad for each in model.parameters())


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
    before_step: Callable[[int], None] = lambda _: None,
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
            before_step(step + 1)
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
    found = accuracy_under(tmp_path, rule, everything, weight=PUSH_WEIGHT_MAX)
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


def test_backup_workers_choose_before_the_rule_does(tmp_path: Path) -> None:
    """It takes five to tolerate one, and six are in each clock."""
    with Job(
        tmp_path,
        workers_min=len(WORKERS),
        aggregation=Aggregation.parse("multi-krum:f=1"),
        bad_gradient_policy=BadGradientPolicy.REJECT,
        backup_worker_count=1,
        step_atomicity=StepAtomicity.CLOCK,
    ) as job:

        def is_over(clock: int) -> None:
            for host in job.shards:
                clocks = host.model.core.clocks
                is_so = host.changes.wait_until(
                    lambda clocks=clocks: clocks.applied_clock >= clock,  # type: ignore[misc]
                    WAIT_TIMEOUT_S / 2,
                )
                assert job.run(is_so)

        def work(worker_id: str) -> tuple[nn.Module, list[psworker.PushResult]]:
            if worker_id == LATE:
                return train(job, worker_id, before_step=is_over)
            return train(
                job, worker_id, attack=sign_flip if worker_id in BAD[:1] else None
            )

        results = run_workers(dict.fromkeys(WORKERS, work))
    assert {each.outcome for each in results[LATE][1]} == {"dropped"}
    assert DIGITS.accuracy(results["w6"][0].eval()) > 0.7


def test_two_runs_have_the_same_bits(tmp_path: Path) -> None:
    def values(folder: Path) -> list[torch.Tensor]:
        rule = Aggregation.parse("multi-krum:f=2")
        with Job(folder, workers_min=len(WORKERS), aggregation=rule) as job:
            results = run_workers(
                dict.fromkeys(
                    WORKERS, lambda w: train(job, w, step_count=4, clip_grad_norm=0.5)
                )
            )
        return list(results["w1"][0].state_dict().values())

    for one, other in zip(
        values(tmp_path / "one"), values(tmp_path / "other"), strict=True
    ):
        assert torch.equal(one, other)


def test_each_of_two_optimizers_has_its_own_clocks(tmp_path: Path) -> None:
    def work(worker_id: str) -> list[float]:
        model = nn.ParameterList([torch.zeros(2), torch.zeros(3)])
        with connect(job, worker_id) as ps:
            model, first, second = ps.prepare(
                model,
                torch.optim.SGD(model[:1], lr=1.0),
                torch.optim.SGD(model[1:], lr=1.0),
            )
            for optimizer, parameter in ((first, model[0]), (second, model[1])) * 2:
                size = 100.0 if worker_id in BAD else float(worker_id[1])
                parameter.grad = torch.full_like(parameter, size)
                optimizer.step()
            return [float(each.detach()[0]) for each in model]

    rule = Aggregation.parse("median")
    with Job(tmp_path, workers_min=len(WORKERS), aggregation=rule) as job:
        results = run_workers(dict.fromkeys(WORKERS, work))
    # Of 1, 2, 4, 5, 6 and twice 100.
    assert results["w1"] == [-10.0, -10.0]


# Large gradients


def ones_job(folder: Path, **settings: Any) -> Job:  # noqa: ANN401
    return Job(folder, workers_min=3, **settings)


def push_ones(
    job: Job,
    worker_id: str,
    sizes: dict[str, list[float]],
    **options: Any,  # noqa: ANN401
) -> tuple[list[float], list[psworker.PushResult]]:
    """Steps of SGD whose gradient has one size everywhere: values and results."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    values, results = [], []
    with connect(job, worker_id) as ps:
        model, optimizer = ps.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), **options
        )
        for size in sizes[worker_id]:
            model.weight.grad = torch.full((1, 3), size)
            optimizer.step(weight=2.0 if worker_id == "w2" else 1.0)
            assert ps.last_push is not None
            results.append(ps.last_push)
            values.append(float(model.weight.detach()[0, 0]))
    return values, results


SIZES: Final = {
    "w0": [9.0, 1.0, float("nan"), 1.0],
    "w1": [1.0, 1.0, 1.0, 1.0],
    "w2": [2.0, 1.0, 1.0, 1.0],
}


@pytest.mark.parametrize("clip_grad_norm", [None, 100.0])
@pytest.mark.parametrize(
    ("policy", "means"),
    [
        (BadGradientPolicy.SKIP, [0.0, 1.0, 0.0, 1.0]),
        (BadGradientPolicy.REJECT, [5 / 3, 1.0, 1.0, 1.0]),
        (BadGradientPolicy.CLIP, [(6 / 3**0.5 + 5) / 4, 1.0, 1.0, 1.0]),
    ],
)
def test_a_gradient_above_the_largest_norm_is_treated_as_asked(
    policy: BadGradientPolicy,
    means: list[float],
    clip_grad_norm: float | None,
    tmp_path: Path,
) -> None:
    settings = {"gradient_norm_max": 6.0, "bad_gradient_policy": policy}
    options = {"clip_grad_norm": clip_grad_norm}
    with ones_job(tmp_path, **settings) as job:
        found = run_workers(
            dict.fromkeys(SIZES, lambda w: push_ones(job, w, SIZES, **options))
        )
    expected = [-sum(means[: step + 1]) for step in range(4)]
    for values, _ in found.values():
        assert values == pytest.approx(expected, rel=1e-5)
    outcomes = [(r.outcome, round(r.gradient_factor, 3)) for r in found["w0"][1]]
    skipped, dropped, applied = ("skipped", 0.0), ("dropped", 0.0), ("applied", 1.0)
    scaled = ("applied", round(6.0 / (9 * 3**0.5), 3))
    assert (
        outcomes
        == {
            BadGradientPolicy.SKIP: [skipped, applied, skipped, applied],
            BadGradientPolicy.REJECT: [dropped, applied, dropped, applied],
            BadGradientPolicy.CLIP: [scaled, applied, dropped, applied],
        }[policy]
    )
    if policy is BadGradientPolicy.SKIP:
        assert [r.nonfinite_worker_ids for r in found["w1"][1]] == [
            ("w0",),
            (),
            ("w0",),
            (),
        ]
    else:
        assert {r.outcome for r in found["w1"][1]} == {"applied"}


@pytest.mark.parametrize("mode", [Mode.SSP, Mode.ASP])
def test_a_push_above_the_largest_norm_is_skipped_or_clipped(
    mode: Mode, tmp_path: Path
) -> None:
    sizes = {"w0": [9.0, 1.0]}
    ends = {}
    for policy in (BadGradientPolicy.REJECT, BadGradientPolicy.CLIP):
        with Job(
            tmp_path / policy.label,
            mode=mode,
            gradient_norm_max=6.0,
            bad_gradient_policy=policy,
        ) as job:
            ends[policy] = push_ones(job, "w0", sizes)
    values, results = ends[BadGradientPolicy.REJECT]
    assert values == [0.0, -1.0]
    assert [each.outcome for each in results] == ["skipped", "applied"]
    values, results = ends[BadGradientPolicy.CLIP]
    assert values[0] == pytest.approx(-6 / 3**0.5, rel=1e-5)
    assert [each.gradient_factor < 1 for each in results] == [True, False]


def test_status_counts_what_did_not_count(tmp_path: Path) -> None:
    def counts(worker_id: str) -> tuple[int, int, int]:
        message = status_message(job.coordinator.core, job.coordinator.waits, now_ms())
        (found,) = (
            each.gradients
            for each in message.workers
            if each.worker.worker_id == worker_id
        )
        return found.bad_count, found.clipped_count, found.left_out_count

    def work(worker_id: str) -> bool:
        model = nn.Linear(3, 1, bias=False)
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=1.0)
            )
            for size in SIZES[worker_id]:
                model.weight.grad = torch.full((1, 3), size)
                optimizer.step()
            wanted = (1, 1, 0) if worker_id == "w0" else (0, 0, 0)
            return job.run(
                job.coordinator.changes.wait_until(
                    lambda: counts(worker_id) == wanted, WAIT_TIMEOUT_S / 2
                )
            )

    policy = BadGradientPolicy.CLIP
    with ones_job(tmp_path, gradient_norm_max=6.0, bad_gradient_policy=policy) as job:
        assert all(run_workers(dict.fromkeys(SIZES, work)).values())


# Refused


@pytest.mark.parametrize(
    ("rule", "options", "make", "reason"),
    [
        ("median", {"loss": "sum"}, torch.optim.SGD, 'can\'t go with loss="sum"'),
        ("median", {}, torch.optim.SparseAdam, "whose gradients are sparse"),
        ("trimmed-mean:0.2", {"compression": "topk"}, torch.optim.SGD, "send 0 for"),
        ("median", {"clip_grad_norm": 1.0}, torch.optim.SGD, "only after that"),
    ],
)
def test_what_can_not_go_with_a_rule_is_refused(
    rule: str,
    options: dict[str, Any],
    make: Callable[..., torch.optim.Optimizer],
    reason: str,
    tmp_path: Path,
) -> None:
    model = nn.Embedding(3, 2, sparse=make is torch.optim.SparseAdam)
    settings: dict[str, Any] = {
        "aggregation": Aggregation.parse(rule),
        "gradient_norm_max": 6.0,
    }
    with (
        Job(tmp_path, **settings) as job,
        connect(job, "w0") as ps,
        pytest.raises(psworker.PsError, match=reason),
    ):
        ps.prepare(model, make(model.parameters(), lr=0.1), **options)


def test_rows_and_other_modes_are_refused_while_a_job_trains(tmp_path: Path) -> None:
    model = nn.Embedding(3, 2, sparse=True)
    rule = Aggregation.parse("median")
    with Job(tmp_path, aggregation=rule) as job, connect(job, "w0") as ps:
        model, optimizer = ps.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        core = job.coordinator.core
        with pytest.raises(Refusal, match="--aggregation median, which takes"):
            job.ask(lambda: core.set_mode(ModeTerms(Mode.ASP, 0), now_ms()))
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(psworker.PsError, match="a row that most workers lack"):
            optimizer.step()
