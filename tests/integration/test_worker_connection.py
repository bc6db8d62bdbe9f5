"""What holds for every connection: to a job of one worker, and to none."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

import psworker
from pswire.leased_data import EpochReport
from psworker import WorkerConnection
from tests.doubles.promised_numbers import DEVIATION_MAX, NORM_DEVIATION_MAX
from tests.integration.job import Job, connect, deviation

STEP_COUNT: Final = 12
DIFFERS_MAX: Final = {"local": 0.0, "job": DEVIATION_MAX}


@pytest.fixture(params=["local", "job"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def ps(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WorkerConnection]:
    monkeypatch.delenv("PS_COORDINATOR", raising=False)
    with ExitStack() as stack:
        if kind == "job":
            job = stack.enter_context(Job(tmp_path))
            yield stack.enter_context(connect(job, "w0"))
        else:
            yield stack.enter_context(psworker.connect(worker_id="w0"))


def new_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401, only one of a connection takes a weight
    scheduler: LRScheduler,
    **weight: float,
) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEP_COUNT):
        inputs = torch.randn(6, 4, generator=generator)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step(**weight)
        scheduler.step()


@pytest.mark.parametrize("is_scheduled_before", [True, False])
def test_the_numbers_are_those_of_the_plain_script(
    ps: WorkerConnection, kind: str, is_scheduled_before: bool
) -> None:
    plain = new_model()
    plain_optimizer = new_optimizer(plain)
    train(plain, plain_optimizer, StepLR(plain_optimizer, 5))

    model = new_model()
    optimizer = new_optimizer(model)
    if is_scheduled_before:
        scheduler = StepLR(optimizer, 5)
        prepared = ps.prepare(model, optimizer, scheduler)
        assert prepared[2] is scheduler
        optimizer = prepared[1]
    else:
        _, optimizer = ps.prepare(model, optimizer)
        scheduler = StepLR(optimizer, 5)
    train(model, optimizer, scheduler, weight=6)

    assert deviation(values_of(model), values_of(plain)) <= DIFFERS_MAX[kind]


def test_clipped_numbers_are_those_of_the_plain_script(
    ps: WorkerConnection, kind: str
) -> None:
    def train(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], float | None],
    ) -> list[float | None]:
        norms = []
        generator = torch.Generator().manual_seed(5)
        for step in range(STEP_COUNT):
            inputs = torch.randn(6, 4, generator=generator) * (step + 1)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            norms.append(clip())
            optimizer.step()
        return norms

    plain, model = new_model(), new_model()
    expected = train(
        plain,
        new_optimizer(plain),
        lambda: float(nn.utils.clip_grad_norm_(plain.parameters(), 0.7)),
    )
    _, optimizer = ps.prepare(model, new_optimizer(model), clip_grad_norm=0.7)
    told = train(
        model, optimizer, lambda: ps.last_push.grad_norm if ps.last_push else None
    )

    assert ps.last_push is not None
    known = [each for each in expected if each is not None]
    assert min(known) < 0.7 < max(known)
    assert [*told[1:], ps.last_push.grad_norm] == pytest.approx(
        known, rel=NORM_DEVIATION_MAX
    )
    assert deviation(values_of(model), values_of(plain)) <= DIFFERS_MAX[kind]


def test_rows_of_a_sparse_table_are_clipped_as_a_dense_one(
    ps: WorkerConnection,
) -> None:
    def train(
        model: nn.Module, optimizer: torch.optim.Optimizer, *, clips: bool
    ) -> None:
        for step in range(STEP_COUNT):
            optimizer.zero_grad()
            model(torch.tensor([step % 5, 2, 2])).square().sum().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()

    plain, model = nn.Embedding(6, 3), nn.Embedding(6, 3, sparse=True)
    model.load_state_dict(plain.state_dict())
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), clips=True)
    _, optimizer = ps.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), clip_grad_norm=0.7
    )
    train(model, optimizer, clips=False)

    assert ps.last_push is not None
    assert ps.last_push.grad_norm is not None
    assert ps.last_push.grad_norm > 0.7
    assert deviation(values_of(model), values_of(plain)) <= DEVIATION_MAX


def test_what_is_no_norm_is_refused(ps: WorkerConnection) -> None:
    model = new_model()
    for wrong, told in (
        (0, "finite and more than 0"),
        (-1.0, "finite and more than 0"),
        (float("nan"), "finite and more than 0"),
        (float("inf"), "finite and more than 0"),
        ("1", "'1' is not a number"),
        (True, "True is not a number"),
    ):
        with pytest.raises(psworker.ConfigurationError, match=told):
            ps.prepare(model, new_optimizer(model), clip_grad_norm=wrong)  # type: ignore[arg-type]
    assert ps.generation == 0


def test_loaders_take_an_epoch_and_yield_every_sample(ps: WorkerConnection) -> None:
    data = TensorDataset(torch.arange(10))
    model = new_model()
    plain, split = (
        DataLoader(data, batch_size=4, shuffle=True),
        DataLoader(data, sampler=DistributedSampler(data, 1, 0), batch_size=4),
    )
    _, optimizer, plain, split = ps.prepare(model, new_optimizer(model), plain, split)
    for epoch in range(2):
        for loader in (plain, split):
            loader.set_epoch(epoch)
            seen = []
            for (samples,) in loader:
                seen += samples.tolist()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            assert sorted(seen) == list(range(10))
        assert split.sampler.epoch == epoch


def test_what_can_not_be_prepared_is_refused(ps: WorkerConnection) -> None:
    model = new_model()
    optimizer = new_optimizer(model)
    for objects, says in (
        ((model,), "at least one model and one optimizer"),
        ((model, optimizer, 3), "does not take a int"),
        ((model, model, optimizer), "given twice"),
    ):
        with pytest.raises(psworker.ConfigurationError, match=says):
            ps.prepare(*objects)
    assert ps.generation == 0


def test_a_refusal_shows_no_frame_of_psworker(ps: WorkerConnection) -> None:
    inside = Path(psworker.__file__).parent
    model = new_model()
    plain = new_optimizer(model)
    with pytest.raises(psworker.ConfigurationError) as wrong_kind:
        ps.prepare(model, plain, 3)
    model, optimizer = ps.prepare(model, plain)
    with pytest.raises(psworker.ConfigurationError) as wrong_weight:
        optimizer.step(weight=-1)
    with pytest.raises(psworker.ConfigurationError) as wrong_parts:
        psworker.data.split(10, by="luck")
    for caught in (wrong_kind, wrong_weight, wrong_parts):
        frames = [Path(str(entry.path)) for entry in caught.traceback]
        assert not [path for path in frames if inside in path.parents], frames


def test_a_process_that_trains_alone_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PS_COORDINATOR", raising=False)
    with caplog.at_level(logging.INFO), psworker.connect() as ps:
        assert ps.worker_id == "local"
        model = new_model()
        ps.prepare(model, new_optimizer(model))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING, "shown without any logging set up"
    assert "this process trains alone" in record.message
    assert "PS_COORDINATOR=HOST:PORT" in record.message
    with pytest.raises(psworker.ConfigurationError, match="step_timeout_s"):
        psworker.connect(step_timeout_s=0)


def test_of_a_torchrun_group_without_a_job_one_process_speaks_for_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PS_COORDINATOR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        psworker.connect().close()
    (record,) = caplog.records
    assert "each of the 4 processes of this torchrun group does" in record.message


def test_alone_an_optimizer_keeps_its_class_and_its_closure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PS_COORDINATOR", raising=False)
    model = new_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        assert isinstance(loss, torch.Tensor)
        return loss

    with psworker.connect() as ps:
        _, prepared = ps.prepare(model, optimizer)
        assert prepared is optimizer
        first = optimizer.step(closure)
        assert optimizer.step(closure) < first
        assert copy.deepcopy(optimizer).state_dict()["state"]


def test_a_loader_has_a_report_and_a_connection_counts_workers(
    ps: WorkerConnection, kind: str
) -> None:
    with pytest.raises(psworker.ConfigurationError, match=r"once prepare\(\) was"):
        _ = ps.worker_count
    model = new_model()
    plain = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    model, optimizer, loader = ps.prepare(model, new_optimizer(model), plain)
    assert ps.worker_count == 1
    assert loader.report is None
    for (inputs,) in loader:
        model(inputs).sum().backward()
        optimizer.step()
    assert len(loader) == loader.batch_count == 2
    assert loader.report == _report(epoch=0, count=8, seen_once=8)


def _report(**counts: Any) -> EpochReport:  # noqa: ANN401, of several kinds
    others = ("seen_again", "torn", "dropped", "skipped", "never", "left_out")
    unnamed = dict.fromkeys(others, 0)
    return EpochReport(**{"loader": "loader", "is_over": True, **unnamed, **counts})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_report_tells_of_what_no_step_took(
    ps: WorkerConnection, num_workers: int
) -> None:
    """The same alone as in a job: accumulation's rest, and what is left out."""
    model = new_model()
    data = TensorDataset(torch.ones(23, 4))
    processes: dict[str, Any] = (
        {"persistent_workers": True, "multiprocessing_context": "fork"}
        if num_workers
        else {}
    )
    plain = DataLoader(
        data,
        batch_size=3,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        **processes,
    )
    ragged = DataLoader(data, batch_sampler=[[0, 1], [2], [3, 4]])
    model, optimizer, loader, other = ps.prepare(
        model, new_optimizer(model), plain, ragged
    )

    for epoch, every, seen in ((0, 2, 18), (1, 1, 21), (5, 4, 12)):
        if epoch == 5:
            loader.set_epoch(5)
        for position, (inputs,) in enumerate(loader):
            model(inputs).sum().backward()
            if position % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()
        assert loader.report == _report(
            epoch=epoch, count=23, seen_once=seen, skipped=21 - seen, left_out=2
        )
    for (inputs,) in other:
        model(inputs).sum().backward()
        optimizer.step()
    assert other.report == _report(
        loader="loader1", epoch=0, count=3, seen_once=3, unit="batches"
    )


def test_a_loader_without_a_report_says_none(ps: WorkerConnection) -> None:
    model = new_model()
    sampled = TensorDataset(torch.ones(8, 4))
    split = DataLoader(
        sampled, sampler=DistributedSampler(sampled, num_replicas=1, rank=0)
    )
    model, optimizer, loader = ps.prepare(model, new_optimizer(model), split)
    for (inputs,) in loader:
        model(inputs).sum().backward()
        optimizer.step()
    assert loader.report is None


def test_loaders_may_be_given_again(ps: WorkerConnection) -> None:
    model = new_model()
    plain = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    model, optimizer, loader = ps.prepare(model, new_optimizer(model), plain)
    for again in (plain, loader):
        model, optimizer, same = ps.prepare(model, optimizer, again)
        assert same is loader


class EagerBatches(Sampler[list[int]]):
    """Draws all when an iteration begins."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(20).view(4, 5).tolist())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "batches", [{"batch_size": 3, "shuffle": True}, {"batch_sampler": EagerBatches()}]
)
def test_alone_a_loader_draws_as_the_plain_one_does(
    monkeypatch: pytest.MonkeyPatch, batches: dict[str, Any], num_workers: int
) -> None:
    """Bit by bit, random numbers of the script between them included."""
    monkeypatch.delenv("PS_COORDINATOR", raising=False)

    def drawn(*, is_prepared: bool) -> list[float]:
        model = new_model()
        loader: Any = DataLoader(
            TensorDataset(torch.arange(20.0)),
            **batches,
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
        )
        with psworker.connect() as ps:
            if is_prepared:
                *_, loader = ps.prepare(model, new_optimizer(model), loader)
            numbers: list[float] = []
            torch.manual_seed(11)
            for _ in range(2):
                iteration = iter(loader)
                numbers.append(float(torch.rand(())))
                for (batch,) in iteration:
                    numbers += [*batch.tolist(), float(torch.rand(()))]
        return numbers

    assert drawn(is_prepared=True) == drawn(is_prepared=False)
