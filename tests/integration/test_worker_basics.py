import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from psworker.connection import Connection
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.broken_calls import (
    BreakableHandler,
    Fault,
    breakable_shards,
    cut_upload,
    leave_unanswered,
    lose_reply,
)
from tests.integration.job import Job, deviation, short_steps, worker_behind


def small_model(seed: int = 0, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def batch(step: int, size: int, worker: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(size, 4, generator=generator)
    return x, x.sum(1, keepdim=True)


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def backward(loss: torch.Tensor) -> None:
    loss.backward()


def run_workers(count: int, work: Callable[[int], object]) -> list[object]:
    """Runs workers at once, each on a thread of its own."""
    with ThreadPoolExecutor(count) as pool:
        return [
            each.result(50) for each in [pool.submit(work, i) for i in range(count)]
        ]


@pytest.fixture(name="job")
def one_worker_job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path / "state") as job:
        yield job


def test_one_worker_trains_as_one_process_does(job: Job) -> None:
    model = small_model()
    alone = copy.deepcopy(model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)

    with psworker.connect(job.address, worker_id="w0") as ps:
        optimizer: torch.optim.Optimizer
        model, optimizer = ps.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        for step in range(10):
            for net, steps in ((model, optimizer), (alone, plain)):
                x, y = batch(step, 16)
                steps.zero_grad()
                backward(nn.functional.mse_loss(net(x), y))
                steps.step()
        assert ps.clock == 10
        assert (ps.worker_id, ps.rank, ps.mode) == ("w0", 0, "bsp")
        assert ps.last_push is not None
        assert ps.last_push.outcome == "applied"
        assert ps.last_push.version == 10
        assert ps.bytes_sent > 0
        assert ps.bytes_received > 0

    assert deviation([values(model)], [values(alone)]) <= DEVIATION_MAX
    assert "closed" in repr(ps)
    assert "psworker-loop" not in {each.name for each in threading.enumerate()}


def test_two_workers_equal_one_process_on_the_union_batch(tmp_path: Path) -> None:
    start = small_model()
    alone = copy.deepcopy(start)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(8):
        x0, y0 = batch(step, 24, 0)
        x1, y1 = batch(step, 8, 1)
        plain.zero_grad()
        x, y = torch.cat([x0, x1]), torch.cat([y0, y1])
        backward(nn.functional.mse_loss(alone(x), y))
        plain.step()

    def work(worker: int) -> torch.Tensor:
        with psworker.connect(job.address, worker_id=f"w{worker}") as ps:
            # Rank 0 seeds, and ranks follow ids: w1's own values are replaced.
            model = copy.deepcopy(start) if worker == 0 else small_model(5)
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1)
            )
            size = 8 if worker else 24
            for step in range(8):
                x, y = batch(step, size, worker)
                optimizer.zero_grad()
                backward(nn.functional.mse_loss(model(x), y))
                optimizer.step(weight=size)
            return values(model)

    with Job(tmp_path / "state", workers_min=2) as job:
        first, second = run_workers(2, work)

    assert isinstance(first, torch.Tensor)
    assert torch.equal(first, second)  # type: ignore[arg-type]
    assert deviation([first], [values(alone)]) <= DEVIATION_MAX


def test_loaders_share_an_epoch_out(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(40.0).view(40, 1))

    def work(worker: int) -> list[float]:
        with psworker.connect(job.address, worker_id=f"w{worker}") as ps:
            model = nn.Linear(1, 1)
            model, optimizer, loader = ps.prepare(
                model,
                torch.optim.SGD(model.parameters(), lr=1e-4),
                DataLoader(data, batch_size=4, shuffle=True),
            )
            seen: list[float] = []
            for (x,) in loader:
                seen += x.flatten().tolist()
                optimizer.zero_grad()
                backward(model(x).mean())
                optimizer.step()
            return seen

    with Job(tmp_path / "state", workers_min=2) as job:
        seen = run_workers(2, work)

    assert sorted(seen[0] + seen[1]) == [float(index) for index in range(40)]  # type: ignore[operator]


def connect_and_prepare(
    job: Job, width: int = 8
) -> tuple[Connection, nn.Module, torch.optim.Optimizer]:
    ps = psworker.connect(job.address, step_timeout_s=60)
    model = small_model(width=width)
    model, optimizer = ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return ps, model, optimizer


@pytest.fixture(params=[True, False], ids=["shared memory", "gRPC"])
def breakable_job(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Job, dict[int, BreakableHandler]]]:
    with (
        breakable_shards() as shards,
        Job(tmp_path / "state", shares_memory=request.param) as job,
    ):
        yield job, shards


@pytest.mark.parametrize("shard_index", [0, 1])
@pytest.mark.parametrize(
    ("width", "fault"),
    [
        (8, lose_reply),
        (200_000, lose_reply),
        (200_000, cut_upload(1)),
        (200_000, cut_upload(2)),
    ],
)
def test_a_push_whose_call_breaks_is_applied_once(
    breakable_job: tuple[Job, dict[int, BreakableHandler]],
    shard_index: int,
    width: int,
    fault: Fault,
) -> None:
    job, shards = breakable_job
    ps, model, optimizer = connect_and_prepare(job, width)
    with ps:
        before = values(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        shards[shard_index].faults.append(fault)

        optimizer.step()

        torch.testing.assert_close(values(model), before - 0.1)
        assert shards[shard_index].push_count == 2
        assert ps.clock == 1
        optimizer.step()
        torch.testing.assert_close(values(model), before - 0.2)


def test_a_push_that_is_done_between_two_calls_is_no_duplicate(
    breakable_job: tuple[Job, dict[int, BreakableHandler]],
) -> None:
    """It waited when the call of one message asked, and not any more since."""
    job, shards = breakable_job
    ps, model, optimizer = connect_and_prepare(job)
    with ps:
        before = values(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for shard in shards.values():
            shard.faults.append(leave_unanswered)

        optimizer.step()

        torch.testing.assert_close(values(model), before - 0.1)
        assert ps.last_push is not None
        assert (ps.last_push.outcome, ps.last_push.duplicate) == ("applied", False)


def test_a_gradient_that_is_not_finite_skips_the_clock(job: Job) -> None:
    ps, model, optimizer = connect_and_prepare(job)
    with ps:
        before = values(model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))

        optimizer.step()

        assert ps.last_push is not None
        assert ps.last_push.skipped
        assert ps.last_push.nonfinite_worker_ids == (ps.worker_id,)
        assert torch.equal(values(model), before)
        assert ps.clock == 1


def test_a_second_worker_with_another_model_is_told_the_difference(
    job: Job,
) -> None:
    ps, _, _ = connect_and_prepare(job)
    with ps, psworker.connect(job.address, worker_id="other") as other:
        model = small_model(width=9)
        with pytest.raises(psworker.SchemaMismatchError, match=r"model\.0\.weight"):
            other.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_wait_for_another_worker_is_ended_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psserver.shard.rpc.parameter_service.WAITING_INTERVAL_MS", 200)
    barrier = threading.Barrier(2)

    def work(worker: int) -> str:
        with psworker.connect(job.address, worker_id=f"w{worker}") as ps:
            model = small_model()
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1)
            )
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            text = ""
            if worker == 0:
                with (
                    short_steps(ps, 6),
                    pytest.raises(psworker.StepTimeoutError) as timeout,
                ):
                    optimizer.step()
                text = str(timeout.value)
                barrier.wait(40)
            else:
                barrier.wait(40)
            before = values(model)
            optimizer.step()  # w0 goes on with the same push
            torch.testing.assert_close(values(model), before - 0.1)
            return text

    with Job(tmp_path / "state", workers_min=2) as job:
        text, _ = run_workers(2, work)

    assert "w1" in str(text)
    assert "the step to clock 1 was not complete within 6 s" in str(text)


def test_prepare_is_refused_after_close(job: Job) -> None:
    ps, model, optimizer = connect_and_prepare(job)
    ps.close()
    with pytest.raises(psworker.ClosedError):
        ps.prepare(model)
    with pytest.raises(psworker.ClosedError):
        optimizer.step()


def test_pending_gradients_keep_the_values_they_were_computed_from(
    tmp_path: Path,
) -> None:

    def work(worker: int) -> torch.Tensor:
        with psworker.connect(job.address, worker_id=f"w{worker}") as ps:
            model = small_model()
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1)
            )
            before = values(model)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            if worker == 0:
                # As a prepared loader notes it: a step was begun.
                worker_behind(ps)._pending.draw(1)
                optimizer.push_nothing()
                assert torch.equal(values(model), before)
            else:
                optimizer.step()
                torch.testing.assert_close(values(model), before - 0.1)
            # In this one most parameters have no gradient, so no value comes back.
            for parameter in list(model.parameters())[1:]:
                parameter.grad = None
            optimizer.step()
            return values(model)

    with Job(tmp_path / "state", workers_min=2) as job:
        first, second = run_workers(2, work)

    assert torch.equal(first, second)  # type: ignore[arg-type]


def test_values_are_written_where_the_parameter_is_now(job: Job) -> None:
    ps, model, optimizer = connect_and_prepare(job)
    with ps:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        before = values(model)

        optimizer.step()

        torch.testing.assert_close(values(model), before - 0.1)
