"""Buffers: equal on all workers after a step, and part of every snapshot."""

import copy
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import psworker
from pswire.membership import Mode
from psworker.snapshots.snapshot import Snapshot
from tests.doubles.fault_proxy import FaultProxy
from tests.integration.job import (
    WAIT_TIMEOUT_S,
    Crew,
    Job,
    connect,
    run_workers,
    worker_behind,
)

SEED: Final = 11
STEP_COUNT: Final = 25
SHARES: Final = {"w0": slice(0, 40), "w1": slice(40, 64)}
"""Each worker's part of a batch; their sizes are the weights."""


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(found.target)


class Net(nn.Sequential):
    """A small network with batch norm, the same for every seed it is built with."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 32, bias=False),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim > 1:
                    drawn = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(drawn / parameter[0].numel() ** 0.5)
                elif name.endswith("bias"):
                    parameter.zero_()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = digits()
    chosen = torch.arange(64 * step, 64 * (step + 1))[rows]
    return images[chosen], labels[chosen]


def backward(model: nn.Module, step: int, rows: slice) -> None:
    images, labels = batch(step, rows)
    nn.functional.cross_entropy(model(images), labels).backward()


def two_replicas() -> Net:
    """Plain torch: each replica sees its part, then both take the means."""
    model = Net()
    optimizer = optimizer_of(model)
    weights = [rows.stop - rows.start for rows in SHARES.values()]
    for step in range(STEP_COUNT):
        replicas = [copy.deepcopy(model) for _ in SHARES]
        for replica, rows in zip(replicas, SHARES.values(), strict=True):
            replica.zero_grad()
            backward(replica, step, rows)
        for parameters in zip(
            model.parameters(), *(each.parameters() for each in replicas), strict=True
        ):
            mine, *theirs = parameters
            mine.grad = mean_of([p.grad for p in theirs], weights)
        optimizer.step()
        for buffers in zip(
            model.buffers(), *(each.buffers() for each in replicas), strict=True
        ):
            held, *seen = buffers
            held.copy_(mean_of(seen, weights) if held.is_floating_point() else seen[0])
    return model


def mean_of(tensors: list[Any], weights: list[int]) -> torch.Tensor:
    total = sum(w * t.double() for w, t in zip(weights, tensors, strict=True))
    assert isinstance(total, torch.Tensor)
    return (total / sum(weights)).to(tensors[0].dtype)


def latest(job: Job) -> Snapshot:
    with psworker.SnapshotReader(job.address) as reader:
        return reader.latest(timeout=WAIT_TIMEOUT_S)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_snapshot_with_batch_norm_evaluates_the_same_everywhere(
    overlap: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(worker_id: str) -> nn.Module:
        rows = SHARES[worker_id]
        model = Net()
        with connect(job, worker_id) as ps:
            _, optimizer = ps.prepare(model, optimizer_of(model), overlap=overlap)
            for step in range(STEP_COUNT):
                optimizer.zero_grad()
                backward(model, step, rows)
                optimizer.step(weight=rows.stop - rows.start)
        return model.eval()

    with Job(tmp_path, shard_count=2, workers_min=2) as job:
        models = run_workers(dict.fromkeys(SHARES, work))
        snapshot = latest(job)
    read = Net().eval()
    read.load_state_dict(snapshot.state_dict(), strict=True)
    images, labels = digits()
    with torch.no_grad():
        outputs = [each(images) for each in (read, *models.values())]

    print(f"seed {SEED}")
    accuracy = (outputs[0].argmax(1) == labels).double().mean()
    assert accuracy > 0.85
    for other in outputs[1:]:
        assert torch.equal(other, outputs[0])
    for name, value in read.state_dict().items():
        for model in models.values():
            assert torch.equal(model.state_dict()[name], value), name
    expected = two_replicas().state_dict()
    for name, value in read.state_dict().items():
        scale = float(expected[name].double().abs().max())
        difference = float((value.double() - expected[name].double()).abs().max())
        assert difference <= 1e-5 * scale, name
    assert read.state_dict()["1.num_batches_tracked"] == STEP_COUNT
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    told = [r.getMessage() for r in warnings if r.name == "psworker"]
    # Where torch may use all cores, overlap says that it leaves none for sending; and
    # who has waited for 5 s on a busy machine says so.
    others = ("prepare(overlap=True): torch", "waiting for")
    told = [text for text in told if not text.startswith(others)]
    assert [text[:24] for text in told] == ["the model has batch norm"]  # of one worker


class Counting(nn.Module):
    """One parameter, and buffers that the test writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("statistic", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("own", torch.zeros(2))
        self.register_buffer("mask", torch.ones(100_000))
        self.statistic: torch.Tensor
        self.count: torch.Tensor
        self.own: torch.Tensor
        self.mask: torch.Tensor


CHOICE: Final = {"statistic": "mean", "count": "leader", "own": "local"}


class Counter:
    """A worker that writes numbers into its buffers and steps."""

    def __init__(
        self,
        job: Job,
        worker_id: str,
        choice: Any = None,  # noqa: ANN401
        *,
        address: str = "",
    ) -> None:
        self.ps = connect(job, worker_id, address=address)
        self.model = Counting()
        sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        _, self.optimizer = self.ps.prepare(
            self.model, sgd, buffers=CHOICE if choice is None else choice
        )

    def step(
        self, value: float, *, weight: float = 1, gradient: float = 1, count: int = 0
    ) -> None:
        with torch.no_grad():
            self.model.statistic.fill_(value)
            self.model.count.fill_(count or int(value))
            self.model.own.fill_(value)
        self.model.weight.grad = torch.full((3,), float(gradient))
        self.optimizer.step(weight=weight)

    def wait_alone(self, job: Job) -> None:
        """Returns once this worker knows that it is the only member."""
        record = job.wait_record(lambda record: len(record.members) == 1)
        membership = worker_behind(self.ps)._session.membership
        worker_behind(self.ps)._loop.run(
            lambda: membership.wait_generation(record.generation), WAIT_TIMEOUT_S
        )

    def held(self) -> tuple[float, int, float]:
        model = self.model
        return model.statistic[0].item(), int(model.count), model.own[0].item()


def pair(job: Job, choice: Any = None) -> tuple[Counter, Counter]:  # noqa: ANN401
    counters: dict[str, Counter] = run_workers(
        {name: lambda w: Counter(job, w, choice) for name in ("w0", "w1")}
    )
    return counters["w0"], counters["w1"]


def both(*works: Callable[[], None]) -> None:
    """Does these at the same time."""
    with ThreadPoolExecutor(len(works)) as threads:
        for done in [threads.submit(work) for work in works]:
            done.result()


@pytest.fixture(name="job")
def job_of_two(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, workers_min=2) as job:
        yield job


def values_of(snapshot: Snapshot) -> tuple[float, int, float]:
    state = snapshot.state_dict()
    return state["statistic"][0].item(), int(state["count"]), state["own"][0].item()


def test_each_policy_does_what_it_says(job: Job) -> None:
    first, second = pair(job)
    with first.ps, second.ps:
        both(lambda: first.step(4), lambda: second.step(8, weight=3))
        assert first.held() == (7, 4, 4)
        assert second.held() == (7, 4, 8)
        assert values_of(latest(job)) == (7, 4, 0)

        # The leader has no data: its buffer stays, the mean is the other's.
        both(lambda: first.step(100, weight=0), lambda: second.step(9))
        assert values_of(latest(job)) == (9, 4, 0)
        assert first.held()[0] == second.held()[0] == 9

        # A skipped clock leaves the job's buffers alone; then they go again.
        both(lambda: first.step(1, gradient=float("inf")), lambda: second.step(2))
        assert values_of(latest(job)) == (9, 4, 0)
        assert first.held()[0] == 1
        both(lambda: first.step(3), lambda: second.step(3))
        assert values_of(latest(job)) == (3, 3, 0)
        assert (first.held()[:2], second.held()[:2]) == ((3, 3), (3, 3))


def test_workers_may_choose_differently(job: Job) -> None:
    works = {
        "w0": lambda w: Counter(job, w, "mean"),
        "w1": lambda w: Counter(job, w, "local"),
    }
    counters = run_workers(works)
    first, second = counters["w0"], counters["w1"]
    with first.ps, second.ps:
        both(lambda: first.step(5), lambda: second.step(8))
        assert first.held() == (5, 5, 5)
        assert second.held() == (8, 8, 8)


def test_the_next_rank_leads_when_the_leader_has_left(job: Job) -> None:
    first, second = pair(job)
    with second.ps:
        both(lambda: first.step(5), lambda: second.step(6))
        assert second.held()[1] == 5
        first.ps.close()
        second.wait_alone(job)
        second.step(7)
        assert values_of(latest(job)) == (7, 7, 0)


def test_a_late_joiner_has_the_buffers_of_the_others_but_its_own(
    tmp_path: Path,
) -> None:
    with Job(tmp_path) as job:
        first = Counter(job, "w0")
        with first.ps:
            first.step(5)
            with Crew({"w1": lambda w: Counter(job, w)}) as crew:
                late = crew.results()["w1"]
                with late.ps:
                    assert late.held() == (5, 5, 0)


def test_a_worker_that_joins_again_has_the_buffers_of_the_others(
    tmp_path: Path,
) -> None:
    with (
        Job(tmp_path, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):
        first = Counter(job, "w0", address=proxy.address)
        second = Counter(job, "w1")
        with first.ps, second.ps:
            both(lambda: first.step(5), lambda: second.step(5))
            proxy.refuse()
            second.wait_alone(job)
            proxy.heal()
            second.step(8)
            first.model.count = torch.tensor(100)  # another tensor, written to as well
            first.step(30)
            assert first.ps.last_push is not None
            assert first.ps.last_push.rejoined
            assert first.held() == (8, 8, 30)

            both(lambda: first.step(9), lambda: second.step(9))
            assert first.held()[:2] == second.held()[:2] == (9, 9)


def test_asp_moves_the_mean_by_a_share_and_takes_the_leaders(tmp_path: Path) -> None:
    with Job(tmp_path, workers_min=2, mode=Mode.ASP) as job:
        first, second = pair(job)
        with first.ps, second.ps:
            first.step(8)
            assert first.held() == (4, 8, 8)
            second.step(2)
            assert second.held() == (3, 8, 2)
            second.step(7, count=9)
            assert second.held() == (5, 8, 7)
            assert values_of(latest(job)) == (5, 8, 0)


def test_buffers_that_do_not_change_cost_no_bytes(tmp_path: Path) -> None:
    with Job(tmp_path, mode=Mode.ASP, shares_memory=False) as job:
        worker = Counter(job, "w0")
        with worker.ps:
            before = worker.ps.bytes_sent + worker.ps.bytes_received
            for value in range(1, 6):
                worker.step(value)
            cost = worker.ps.bytes_sent + worker.ps.bytes_received - before
            assert cost < worker.model.mask.nbytes / 20

            worker.model.mask.mul_(2)
            sent = worker.ps.bytes_sent
            worker.step(6)
            assert worker.ps.bytes_sent - sent > worker.model.mask.nbytes
            assert latest(job).state_dict()["mask"][-1] == 2


def test_a_buffer_that_the_script_puts_anew_is_written_to(job: Job) -> None:
    first, second = pair(job)

    def work(counter: Counter, value: int) -> None:
        counter.model.count = counter.model.count + value
        counter.model.statistic = counter.model.statistic * 1 + value
        counter.model.weight.grad = torch.ones(3)
        counter.optimizer.step()

    with first.ps, second.ps:
        for _ in range(2):
            both(lambda: work(first, 1), lambda: work(second, 3))
        assert first.held()[:2] == second.held()[:2] == (4, 2)

        first.model.statistic = torch.zeros(4)
        with pytest.raises(
            psworker.ConfigurationError, match="'statistic' of model is"
        ):
            first.optimizer.step()
        first.model.statistic = torch.full((3,), 10.0)
        both(lambda: work(first, 0), lambda: second.step(20))
        assert second.held()[0] == 15


def test_pending_gradients_keep_buffers_that_went_on(job: Job) -> None:
    """An idle worker takes part with nothing; its own forward pass is not undone."""
    first, second = pair(job)
    with first.ps, second.ps:
        worker_behind(first.ps)._pending.draw(1)  # half of an accumulation
        first.model.weight.grad = torch.ones(3)
        first.model.statistic.fill_(100)
        both(first.optimizer.push_nothing, lambda: second.step(2))
        assert first.held()[0] == 100
        assert second.held()[0] == 2
        both(lambda: first.optimizer.step(weight=1), lambda: second.step(4))
        assert first.held()[0] == second.held()[0] == 52


def test_the_buffers_of_a_gans_model_come_with_the_push_of_its_own_optimizer(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    def work(worker_id: str) -> list[torch.Tensor]:
        rank = int(worker_id[1:])
        models = [nn.BatchNorm1d(2) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        with connect(job, worker_id) as ps:
            *_, one, other = ps.prepare(
                *models, *optimizers, buffers={"model1.running_mean": "leader"}
            )
            inputs = torch.tensor([[0.0, 2.0], [4.0, 6.0]]) + 10 * rank
            models[1](models[0](inputs)).square().sum().backward()
            means = [model.get_buffer("running_mean") for model in models]
            means[1].fill_(7 + rank)
            one.step()
            held = [mean.clone() for mean in means]
            other.step()
        return [*held, means[1].clone()]

    for rank, held in enumerate(run_workers({"w0": work, "w1": work}).values()):
        torch.testing.assert_close(held[0], torch.tensor([0.7, 0.9]))
        assert held[1].tolist() == [7 + rank] * 2  # a graph may hold it
        assert held[2].tolist() == [7, 7]
    assert "batch norm" not in caplog.text


def test_a_choice_that_is_none_is_refused_before_the_job_hears_of_it(
    tmp_path: Path,
) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = Counting()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(psworker.ConfigurationError, match="fits no buffer"):
            ps.prepare(model, sgd, buffers={"stat": "mean"})
        ps.prepare(model, sgd, buffers="mean")
        assert ps.generation == 1


def test_a_process_that_is_alone_takes_the_same_option() -> None:
    with psworker.LocalConnection() as ps:
        model = Counting()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(psworker.ConfigurationError, match="is no policy"):
            ps.prepare(model, sgd, buffers="median")
        ps.prepare(model, sgd, buffers=CHOICE)


def test_policies_stay_when_prepare_is_called_again(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        worker = Counter(job, "w0")
        with worker.ps:
            adam = torch.optim.Adam(worker.model.parameters())
            with pytest.raises(psworker.ConfigurationError) as caught:
                worker.ps.prepare(worker.model, adam, buffers="mean")
            assert str(caught.value) == (
                "buffers keep the policies of the first prepare(); leave buffers out, "
                "or give the same, when prepare() is called again"
            )
            _, worker.optimizer = worker.ps.prepare(worker.model, adam, buffers=CHOICE)
            worker.step(6)
            assert values_of(latest(job)) == (6, 6, 0)
