"""Steps under way while something else happens: errors, evictions, ends, new modes."""

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.addresses import Address, parse_address
from pswire.membership import Mode, ModeTerms
from tests.doubles.fault_proxy import DOWN, UP, FaultProxy
from tests.integration.job import (
    Crew,
    Job,
    connect,
    evict,
    run_workers,
    short_steps,
    worker_behind,
)

SEED: Final = 20261130
ELEMENT_COUNT: Final = 200_000


class Ones(nn.Module):
    """A forward pass whose gradient is one everywhere, and whose values count steps."""

    def __init__(self, element_count: int = 4000) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(8))
        self.second = nn.Parameter(torch.zeros(element_count))

    def forward(self) -> torch.Tensor:
        return self.first.sum() + self.second.sum()


class Worker:
    def __init__(
        self,
        job: Job,
        worker_id: str,
        *,
        address: str = "",
        element_count: int = 4000,
        overlap: bool = True,
        **settings: float,
    ) -> None:
        self.ps = connect(job, worker_id, address=address, **settings)
        self.model = Ones(element_count)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        _, self.optimizer = self.ps.prepare(self.model, optimizer, overlap=overlap)

    def step(self) -> None:
        self.model().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def value(self) -> float:
        self.ps.wait()
        values = torch.cat([each.detach() for each in self.model.parameters()])
        assert values.unique().numel() == 1
        return float(values[0])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path / "state") as job:
        yield job


def test_a_step_that_returned_surfaces_its_error_later_and_goes_on(job: Job) -> None:
    other = Worker(job, "w1")
    worker = Worker(job, "w0")
    with other.ps, worker.ps:
        with short_steps(worker.ps, 2):
            worker.step()  # returns though the other has not pushed
            with pytest.raises(psworker.StepTimeoutError, match="step to clock 1 was"):
                worker.ps.wait()
            with pytest.raises(psworker.StepTimeoutError, match=r"step\(\) again"):
                worker.model()

        other.step()

        assert worker.value == other.value == -1
        assert worker.ps.clock == 1
        assert worker.ps.last_push is not None
        assert worker.ps.last_push.outcome in ("applied", "duplicate")


def test_leaving_completes_the_step_that_is_under_way(job: Job) -> None:
    with connect(job, "w0") as ps:
        model = Ones()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = ps.prepare(model, optimizer, overlap=True)
        model().backward()
        optimizer.step()
    # What was hung up at the model is gone with the connection.
    assert type(model._parameters) is dict
    assert not model._forward_pre_hooks
    model().backward()
    with psworker.SnapshotReader(job.address) as reader:
        assert reader.latest(timeout=10).clock == 1


def test_a_copy_of_the_model_is_a_plain_one(job: Job) -> None:
    worker = Worker(job, "w0")
    with worker.ps:
        worker.step()
        twin = copy.deepcopy(worker.model)
        assert float(twin.second.detach()[0]) == -1  # it waited for the values
        worker.step()
        twin().backward()
        assert float(twin.second.detach()[0]) == -1
        assert type(twin._parameters) is dict
        assert worker.value == -2


def test_a_model_compiled_in_place_is_waited_for_in_its_step(job: Job) -> None:
    model = Ones()
    model.compile(backend="eager")
    with connect(job, "w0") as ps:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        _, optimizer = ps.prepare(model, optimizer, overlap=True)
        parameters = list(model.parameters())
        for count in range(1, 4):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert {float(p.detach()[0]) for p in parameters} == {-count}


def test_what_torch_compile_returned_is_waited_for_at_its_call(job: Job) -> None:
    model: Any = torch.compile(Ones(), backend="eager", fullgraph=True)
    with connect(job, "w0") as ps:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        _, optimizer = ps.prepare(model, optimizer, overlap=True)
        losses = []
        for _ in range(3):
            losses.append(float(model().detach()))
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses == [0.0, -4008.0, -8016.0]


def test_cut_calls_change_no_number(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    drawn = random.Random(SEED)
    with ExitStack() as stack:
        proxies: list[FaultProxy] = []

        def through_proxy(address: Address) -> Address:
            proxies.append(stack.enter_context(FaultProxy(str(address))))
            return parse_address(proxies[-1].address)

        job = stack.enter_context(
            Job(tmp_path, advertise={0: through_proxy, 1: through_proxy})
        )
        worker = Worker(job, "w0", element_count=ELEMENT_COUNT)
        with worker.ps:
            for step in range(1, 17):
                proxy = drawn.choice(proxies)
                way = UP if drawn.random() < 0.6 else DOWN
                proxy.cut_after(drawn.randrange(1, ELEMENT_COUNT * 2), way)
                worker.step()
                if step % 4 == 0:
                    assert worker.value == -step
            assert worker.value == -16
            assert worker.ps.clock == 16
        assert job.step_counts(1) == {16}
        assert sum(proxy.cut_count for proxy in proxies) >= 5


@pytest.mark.parametrize("is_found_by", ["forward", "backward", "step", "wait"])
def test_an_eviction_with_a_step_under_way_mixes_no_values(
    is_found_by: str, tmp_path: Path
) -> None:
    with (
        Job(tmp_path / "state", sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):
        other = Worker(job, "w1", overlap=False, step_timeout_s=40)
        worker = Worker(job, "w0", address=proxy.address, step_timeout_s=40)
        with other.ps, worker.ps:
            with Crew({"w1": lambda _: other.step()}):
                worker.step()
                worker.ps.wait()
            worker.step()
            if is_found_by in ("backward", "step"):
                # What the next forward pass reads is there; the end is not.
                with Crew({"w1": lambda _: other.step()}):
                    loss = worker.model()
                worker.optimizer.zero_grad()
            job.wait_pushed("w0", 2)
            evict(job, proxy, "w0")
            with Crew({"w1": lambda _: other.step()}) as crew:
                if is_found_by == "forward":
                    worker.model()
                elif is_found_by in ("backward", "step"):
                    loss.backward()
                    worker.optimizer.step()
                worker.ps.wait()
                crew.results()
            result = worker.ps.last_push
            assert result is not None
            with Crew({"w1": lambda _: other.step()}) as crew:
                worker.step()
                crew.results()
            assert worker.value == other.value


def test_a_mode_that_changes_under_way(tmp_path: Path) -> None:
    with Job(tmp_path, workers_min=2) as job:

        def work(worker_id: str) -> float:
            worker = Worker(job, worker_id)
            with worker.ps:
                for step in range(30):
                    if worker_id == "w0" and step % 10 == 5:
                        mode = [Mode.ASP, Mode.SSP, Mode.BSP][step // 10]
                        change = job.coordinator.set_mode(
                            ModeTerms(mode, 2), timeout_s=30
                        )
                        job.run(change)
                    worker.step()
                return worker.value  # the same in all elements

        run_workers({"w0": work, "w1": work})
        record = job.wait_record(lambda record: not record.members)
        assert record.mode is Mode.BSP
        assert record.departed_step_count == 2 * 30


def _leased(job: Job, *, overlap: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    models = {name: nn.Linear(3, 2) for name in ("w0", "w1")}
    models["w1"].load_state_dict(models["w0"].state_dict())

    def work(worker_id: str) -> tuple[list[list[int]], list[torch.Tensor]]:
        inputs = torch.linspace(-1, 1, 180).reshape(60, 3)
        loader = DataLoader(TensorDataset(inputs, torch.arange(60)), 4, shuffle=True)
        model = models[worker_id]
        seen = []
        with connect(job, worker_id) as ps:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, batches = ps.prepare(
                model, optimizer, loader, overlap=overlap
            )
            for _ in range(3):
                for x, indices in batches:
                    seen.append(indices.tolist())
                    model(x).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            ps.wait()
        return seen, [p.detach().clone() for p in model.parameters()]

    return run_workers({"w0": work, "w1": work})


def test_leased_data_goes_the_same_way(tmp_path: Path) -> None:
    results = []
    for overlap in (True, False):
        with Job(tmp_path / str(overlap), workers_min=2) as job:
            results.append(_leased(job, overlap=overlap))
    for name in ("w0", "w1"):
        assert results[0][name][0] == results[1][name][0]
        assert all(map(torch.equal, results[0][name][1], results[1][name][1]))


def test_a_gradient_of_old_and_new_values_is_thrown_away(tmp_path: Path) -> None:
    """The worker is evicted after its forward pass has read a part of the values."""
    with (
        Job(tmp_path / "state", sockets=True) as job,
        FaultProxy(job.address) as proxy,
        FaultProxy(job.shard_addresses()[1]) as far,
    ):
        other = Worker(job, "w1", overlap=False, step_timeout_s=40)
        worker = Worker(job, "w0", address=proxy.address, step_timeout_s=40)
        membership = worker_behind(worker.ps)._session.membership
        near, old = membership.shards
        membership.shards = (near, type(old)(1, far.address, old.incarnation))
        with other.ps, worker.ps:
            for is_cut_off in (False, True):
                if is_cut_off:
                    far.black_hole((DOWN,))
                with Crew({"w1": lambda _: other.step()}) as crew:
                    worker.step()
                    if not is_cut_off:
                        worker.ps.wait()
                    crew.results()
            first = worker.model.first.sum()  # came from shard 0
            evict(job, proxy, "w0")
            other.step()
            loss = first + worker.model.second.sum()  # joins again
            loss.backward()

            with Crew({"w1": lambda _: other.step()}) as crew:
                worker.optimizer.step()
                worker.optimizer.zero_grad()
                result = worker.ps.last_push
                crew.results()

            assert result is not None
            assert result.dropped
            assert worker.value == other.value == -4
