"""Jobs with differential privacy: what leaves a worker, and what is counted of it."""

import random
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import psworker
from psserver.coordinator.rpc.status_report import status_message
from psserver.edge.monotonic import now_ms
from pswire.membership import Mode, StepAtomicity
from pswire.v1 import coordinator_service_pb2 as messages
from psworker.optim.privacy import gaussian
from tests.doubles.fault_proxy import FaultProxy
from tests.integration.job import Job, connect, run_workers
from tests.integration.test_checkpoints import job_in, save

SAMPLE_COUNT: Final = 12
BATCH_SIZE: Final = 4
NORM: Final = 0.05
"""Far below the norms of the gradients here: all are clipped."""
NOISE: Final = 2.0
DELTA: Final = 1e-5

SAMPLES: Final = torch.randn(
    SAMPLE_COUNT, 6, generator=torch.Generator().manual_seed(1)
)
TARGETS: Final = torch.randn(
    SAMPLE_COUNT, 3, generator=torch.Generator().manual_seed(2)
)


def privacy(**changed: Any) -> psworker.DifferentialPrivacy:  # noqa: ANN401
    settings = {"noise_multiplier": NOISE, "max_grad_norm": NORM, "delta": DELTA}
    return psworker.DifferentialPrivacy(**{**settings, **changed})


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    loader = DataLoader(TensorDataset(SAMPLES, TARGETS), BATCH_SIZE)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), loader


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:  # noqa: ANN401
    return nn.functional.mse_loss(model(inputs), targets)


def step(model: nn.Module, optimizer: Any, batch: Any) -> None:  # noqa: ANN401
    loss_of(model, *batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped_sum(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    """The sum of clipped gradients, one sample after the other."""
    sums = [torch.zeros_like(each) for each in model.parameters()]
    for sample, target in zip(inputs, targets, strict=True):
        model.zero_grad()
        loss_of(model, sample[None], target[None]).backward()
        found = [e.grad for e in model.parameters() if e.grad is not None]
        norm = torch.cat([each.flatten() for each in found]).norm()
        for total, each in zip(sums, found, strict=True):
            total += each * min(1.0, NORM / float(norm))
    model.zero_grad()
    return sums


def status_in(job: Job) -> messages.PrivacyStatus:
    """As the coordinator answers."""

    def ask() -> messages.GetStatusResponse:
        host = job.coordinator
        return status_message(host.core, host.waits, now_ms())

    return job.ask(ask).privacy


def test_what_leaves_a_worker_is_clipped_by_samples_and_has_noise(
    tmp_path: Path,
) -> None:
    """Two workers in BSP, beside one sample at a time and the noise of their seeds."""
    reference, _, _ = build()

    def work(worker_id: str) -> list[torch.Tensor]:
        model, optimizer, loader = build()
        with connect(job, worker_id) as ps:
            model, optimizer, loader = ps.prepare(
                model,
                optimizer,
                loader,
                differential_privacy=privacy(insecure_seed=7),
            )
            batches = iter(loader)
            step(model, optimizer, next(batches))
            values = [each.detach().clone() for each in model.parameters()]
            for batch in batches:
                step(model, optimizer, batch)
        return values

    with Job(tmp_path, workers_min=2) as job:
        found = run_workers({"w0": work, "w1": work})

    sums = clipped_sum(reference, SAMPLES[:8], TARGETS[:8])
    noises = {w: random.Random(f"7 {w}").randbytes for w in found}
    for mine, others, total, before in zip(
        found["w0"], found["w1"], sums, reference.parameters(), strict=True
    ):
        noise = sum(
            gaussian(total.numel(), source).view(total.shape) * NOISE * NORM
            for source in noises.values()
        )
        want = before.detach() - (total + noise) / 8
        torch.testing.assert_close(mine, want.float(), rtol=1e-4, atol=1e-6)
        assert torch.equal(mine, others)


def test_epochs_are_counted_and_the_budget_ends_training(tmp_path: Path) -> None:
    """By the library's own figure; also after a restart of the coordinator."""
    from opacus.accountants.analysis.gdp import eps_from_mu

    direct = [eps_from_mu(mu=k**0.5 / NOISE, delta=DELTA) for k in (1, 2, 3)]
    model, optimizer, loader = build()
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model, optimizer, loader = ps.prepare(
            model,
            optimizer,
            loader,
            differential_privacy=privacy(epsilon_max=(direct[1] + direct[2]) / 2),
        )
        assert status_in(job).epsilon == 0.0
        for epoch in range(2):
            for batch in loader:
                step(model, optimizer, batch)
            found = status_in(job)
            assert found.participation_count == epoch + 1
            assert found.epsilon == pytest.approx(direct[epoch], rel=1e-9)
        job.stop_coordinator()
        job.start_coordinator()
        values = [each.detach().clone() for each in model.parameters()]
        clock = ps.clock
        with pytest.raises(psworker.PrivacyBudgetError, match="the job allows 2"):
            next(iter(loader))
        assert status_in(job) == found
        assert ps.clock == clock
        for before, now in zip(values, model.parameters(), strict=True):
            assert torch.equal(before, now)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"mode": Mode.ASP}, {"compression": "int8", "clip_grad_norm": 0.1}),
        pytest.param(
            {"mode": Mode.SSP, "staleness_bound": 1},
            {"loss": "sum"},
            marks=pytest.mark.repeat,
        ),
        pytest.param(
            {"backup_worker_count": 1, "step_atomicity": StepAtomicity.CLOCK},
            {"compression": "topk"},
            marks=pytest.mark.repeat,
        ),
    ],
)
def test_it_goes_with_all_that_comes_after_the_noise(
    tmp_path: Path, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    model, optimizer, loader = build()
    with Job(tmp_path, **settings) as job, connect(job, "w0") as ps:
        model, optimizer, loader = ps.prepare(
            model, optimizer, loader, differential_privacy=privacy(), **options
        )
        before = [each.detach().clone() for each in model.parameters()]
        for batch in loader:
            step(model, optimizer, batch)
        pairs = zip(before, model.parameters(), strict=True)
        assert any(not torch.equal(old, new) for old, new in pairs)
        assert ps.clock == SAMPLE_COUNT // BATCH_SIZE
        assert status_in(job).participation_count == 1


def test_what_would_count_twice_or_go_without_noise_is_refused(
    tmp_path: Path,
) -> None:
    model, inner, loader = build()
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        state = inner.state_dict()
        model, optimizer, loader = ps.prepare(
            model, inner, loader, differential_privacy=privacy()
        )
        with (
            connect(job, "w1") as other,
            pytest.raises(
                psworker.OptimizerMismatchError,
                match=r"the job has differential_privacy \(noise_multiplier=2, "
                r"max_grad_norm=0\.05, .* this worker has no differential_privacy",
            ),
        ):
            other.prepare(*build())
        batches = iter(loader)
        batch = next(batches)
        step(model, optimizer, batch)
        values = [each.detach().clone() for each in model.parameters()]
        refused: list[tuple[str, Callable[[], object]]] = [
            (
                "of 4 samples, and for it batches of no samples",
                lambda: step(model, optimizer, batch),
            ),
            ("come from no call", lambda: step_with_ones(model, optimizer)),
            (
                "of 4 and 4 samples, and for it batches of 4",
                lambda: step_twice(model, optimizer, batches),
            ),
            ("leave step(weight=...) out", lambda: optimizer.step(weight=3)),
            ("load it before prepare", lambda: load(optimizer, state)),
            ("set them before prepare", ps.publish),
        ]
        for text, attempt in refused:
            with pytest.raises(psworker.PsError, match=re.escape(text)):
                attempt()
            optimizer.zero_grad()
        assert ps.clock == 1
        for before, now in zip(values, model.parameters(), strict=True):
            assert torch.equal(before, now)


def step_with_ones(model: nn.Module, optimizer: Any) -> None:  # noqa: ANN401
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()


def step_twice(model: nn.Module, optimizer: Any, batches: Iterator[Any]) -> None:  # noqa: ANN401
    """Two backward passes of one batch."""
    batch = next(batches)
    loss_of(model, *batch).backward()
    step(model, optimizer, batch)


def load(optimizer: Any, state: Any) -> None:  # noqa: ANN401
    for each in state["param_groups"][0]["params"]:
        state["state"][each] = {"momentum_buffer": torch.zeros(1)}
    optimizer.load_state_dict(state)
    optimizer.step()


def test_a_step_over_two_epochs_is_refused(tmp_path: Path) -> None:
    """A sample may be in the last batch of the one, and in the first of the next."""
    model, optimizer, loader = build()
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model, optimizer, loader = ps.prepare(
            model, optimizer, loader, differential_privacy=privacy()
        )
        for batch in loader:
            loss_of(model, *batch).backward()
        loss_of(model, *next(iter(loader))).backward()
        with pytest.raises(psworker.ConfigurationError, match="of epochs 0, 1"):
            optimizer.step()
        optimizer.zero_grad()
        assert ps.clock == 0


def test_a_gradient_that_counts_for_nothing_is_not_sent_later(tmp_path: Path) -> None:
    model, optimizer, loader = build()
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model, optimizer, loader = ps.prepare(
            model, optimizer, loader, differential_privacy=privacy()
        )
        values = [each.detach().clone() for each in model.parameters()]
        loss_of(model, *next(iter(loader))).backward()
        optimizer.step(weight=0)
        optimizer.step()
        assert ps.clock == 2
        for before, now in zip(values, model.parameters(), strict=True):
            assert torch.equal(before, now)


def test_a_sampler_that_draws_a_sample_twice_is_refused(tmp_path: Path) -> None:
    model, optimizer, plain = build()
    sampler = WeightedRandomSampler([1.0] * SAMPLE_COUNT, SAMPLE_COUNT)
    loader: Any = DataLoader(plain.dataset, BATCH_SIZE, sampler=sampler)
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        *_, loader = ps.prepare(
            model, optimizer, loader, differential_privacy=privacy()
        )
        with pytest.raises(psworker.UnsupportedError, match="without replacement"):
            next(iter(loader))


def test_what_was_pushed_before_a_return_to_a_checkpoint_stays_spent(
    tmp_path: Path,
) -> None:
    """The epoch that the checkpoint is in begins anew for what was pushed since."""
    model, optimizer, loader = build()
    with (
        job_in(tmp_path, workers_min=1, lease_ttl_ms=2_000) as job,
        connect(job, "w0") as ps,
    ):
        model, optimizer, loader = ps.prepare(
            model, optimizer, loader, differential_privacy=privacy()
        )
        batches = iter(loader)
        step(model, optimizer, next(batches))
        save(job)
        step(model, optimizer, next(batches))
        assert status_in(job).participation_count == 1
        job.replace_shard(1)
        for batch in batches:
            step(model, optimizer, batch)
        # Once before the return, once since, and what was held went to a new start.
        assert status_in(job).participation_count == 3


# What happens to a gradient of a batch that is another worker's by now.
@pytest.mark.repeat
def test_an_evicted_worker_goes_on_and_its_data_counts_again(tmp_path: Path) -> None:
    built = {worker_id: build() for worker_id in ("w0", "w1")}
    with (
        Job(tmp_path, mode=Mode.ASP, sockets=True) as job,
        FaultProxy(job.address) as proxy,
        connect(job, "w0", address=proxy.address, step_timeout_s=40) as lost,
        connect(job, "w1") as ps,
    ):

        def prepare(connection: psworker.Connection, worker_id: str) -> Any:  # noqa: ANN401
            return connection.prepare(*built[worker_id], differential_privacy=privacy())

        model, optimizer, loader = prepare(lost, "w0")
        batches = iter(loader)
        loss_of(model, *next(batches)).backward()
        others = prepare(ps, "w1")
        proxy.refuse()
        job.wait_record(
            lambda record: [m.worker.worker_id for m in record.members] == ["w1"]
        )
        for batch in others[2]:
            step(others[0], others[1], batch)
        proxy.heal()
        optimizer.step()
        assert lost.last_push is not None
        assert lost.last_push.rejoined
        optimizer.step()  # the same gradient, which counts for nothing
        optimizer.zero_grad()
        for batch in batches:
            step(model, optimizer, batch)
        assert status_in(job).participation_count == 2


@pytest.mark.repeat
def test_the_example_trains_and_spends_what_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn.datasets")
    example = Path(__file__).resolve().parents[2] / "examples" / "private_digits.py"
    with Job(tmp_path) as job:
        monkeypatch.setenv("PS_COORDINATOR", job.address)
        monkeypatch.setenv("PS_WORKER_ID", "w0")
        runpy.run_path(str(example), run_name="__main__")
        found = status_in(job)
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)", capsys.readouterr().out)
    assert float(accuracy) > 0.85
    assert f"{found.epsilon:.3f} of {found.epsilon_max:.3f}" == "4.983 of 4.983"
    assert (found.participation_count, found.participation_max) == (20, 20)


def test_alone_it_is_refused() -> None:
    with (
        psworker.connect() as ps,
        pytest.raises(psworker.UnsupportedError, match="needs a job"),
    ):
        ps.prepare(*build(), differential_privacy=privacy())
