"""A worker that was evicted and lives: it joins again by itself, and nothing counts
twice."""

import math
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.membership import LossPolicy, Mode
from psworker.connection import Connection
from psworker.member.shard_reach import ShardClients
from psworker.optim.optimizer import PreparedOptimizer
from psworker.transport.calls import CallError
from psworker.transport.ports import ShardPort
from tests.doubles.children import Nursery
from tests.doubles.fault_proxy import DOWN, FaultProxy
from tests.integration.job import Crew, Job, connect, evict, key, worker_behind
from tests.integration.ones_worker import Worker
from tests.integration.processes import Processes

SHORT_LEASE_MS: Final = 3_000
"""Where silence is what is noticed. A broken connection is noticed soon in any job, and
a lease that no stall of the machine outlasts leaves the others in their places."""

SAMPLE_COUNT: Final = 80


@pytest.fixture(name="job")
def job_of_sockets(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path / "state", sockets=True) as job:
        yield job


def worker_of(
    job: Job, address: str, worker_id: str, start_timeout_s: float = 20
) -> Worker:
    """One whose coordinator is behind a proxy that can be cut."""
    return Worker.of(
        job,
        worker_id,
        address=address,
        element_count=8,
        step_timeout_s=40,
        start_timeout_s=start_timeout_s,
    )


def test_a_worker_that_was_evicted_between_steps_joins_again_in_the_next(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultProxy(job.address) as proxy:
        other = worker_of(job, job.address, "w1")
        worker = worker_of(job, proxy.address, "w0")
        with other.ps, worker.ps:
            generation = worker.ps.generation
            evict(job, proxy, "w0")
            other.step()
            other.step()

            result = worker.step()

            assert (result.outcome, result.rejoined) == ("dropped", True)
            assert worker.ps.last_push is result
            assert worker.value == -2
            assert worker.ps.clock == 2
            assert worker.ps.rank == 1
            assert worker.ps.generation > generation
            with Crew({"w1": lambda _: other.step()}) as crew:
                after = worker.step()
                crew.results()
            assert (after.outcome, after.rejoined) == ("applied", False)
            assert worker.ps.clock == 3
            assert worker.value == other.value == -3
    told = [text for text in caplog.messages if "joined again" in text]
    assert len(told) == 1
    assert "worker w0 was evicted" in told[0]
    assert "as start 2, at clock 2" in told[0]


@pytest.mark.parametrize("is_step", [True, False], ids=["step", "push_nothing"])
def test_a_gradient_is_thrown_away_once_by_what_finds_the_eviction(
    job: Job, *, is_step: bool
) -> None:
    """A step ends with its own gradient, one that pushes nothing leaves it begun."""
    with FaultProxy(job.address) as proxy:
        other = worker_of(job, job.address, "w1")
        worker = worker_of(job, proxy.address, "w0")
        with other.ps, worker.ps:
            state = worker.optimizer.state_dict()
            evict(job, proxy, "w0")
            other.step()
            assert isinstance(worker.optimizer, PreparedOptimizer)
            worker_behind(worker.ps)._pending.draw(4)
            worker.backward()
            # So that shards are asked before the push begins.
            worker.optimizer.load_state_dict(state)

            if is_step:
                worker.step()
            else:
                worker.optimizer.push_nothing()
            found = worker.ps.last_push
            with Crew({"w1": lambda _: other.step()}) as crew:
                after = worker.step()
                crew.results()

            assert found is not None
            assert (found.outcome, found.rejoined) == ("dropped", True)
            assert (after.outcome, after.rejoined) == (
                "applied" if is_step else "dropped",
                False,
            )
            assert worker.value == other.value


@pytest.mark.parametrize(
    ("others_gradient", "outcome", "value"),
    [(1.0, "applied", -1), (math.inf, "skipped", 0)],
)
def test_a_push_under_way_that_was_complete_everywhere_counts(
    tmp_path: Path, others_gradient: float, outcome: str, value: int
) -> None:
    with (
        Job(tmp_path / "state", sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):
        other = worker_of(job, job.address, "w1")
        worker = worker_of(job, proxy.address, "w0")
        with other.ps, worker.ps, Crew({"w0": lambda _: worker.step()}) as crew:
            job.wait_pushed("w0", 1)
            evict(job, proxy, "w0")
            job.wait_record(lambda record: len(record.members) == 2)
            # Both parts of clock 1 count, though one is of a start that is gone.
            for parameter in other.model.parameters():
                parameter.grad = torch.full_like(parameter, others_gradient)
            other.optimizer.step()
            result = crew.results()["w0"]

            assert (result.outcome, result.rejoined) == (outcome, True)
            assert other.value == value
            assert worker.value == value
            assert worker.ps.clock == 1


def test_a_push_that_some_shard_lacks_is_thrown_away(tmp_path: Path) -> None:
    """And the gradient is sent under no other id."""
    with (
        Job(tmp_path / "state", sockets=True) as job,
        FaultProxy(job.address) as proxy,
        FaultProxy(job.shard_addresses()[1]) as far,
    ):
        other = worker_of(job, job.address, "w1")
        worker = worker_of(job, proxy.address, "w0")
        shards = worker_behind(worker.ps)._session.membership.shards
        reached = (shards[0], type(shards[1])(1, far.address, shards[1].incarnation))
        with other.ps, worker.ps:
            worker_behind(worker.ps)._session.membership.shards = reached
            far.refuse()
            with Crew({"w0": lambda _: worker.step()}) as crew:
                assert job.run(
                    job.shards[0].changes.wait_until(
                        lambda: job.shards[0].model.core.queued_push_count == 1, 10
                    )
                )
                evict(job, proxy, "w0")
                result = crew.results()["w0"]

            assert (result.outcome, result.rejoined) == ("dropped", True)
            with Crew({"w1": lambda _: other.step()}) as crew:
                assert worker.step().outcome == "applied"
                crew.results()
            assert other.value == worker.value == -1
            assert job.step_counts(0) == {1}


def test_a_push_that_a_clock_did_not_wait_for_is_known_as_dropped(
    tmp_path: Path,
) -> None:
    """It was complete everywhere, which is not to say that it counts."""
    with (
        Job(
            tmp_path / "state",
            backup_worker_count=1,
            sockets=True,
        ) as job,
        FaultProxy(job.address) as proxy,
        FaultProxy(job.shard_addresses()[0]) as near,
    ):
        others = [worker_of(job, job.address, name) for name in ("w1", "w2")]
        worker = worker_of(job, proxy.address, "w0")
        shards = worker_behind(worker.ps)._session.membership.shards
        reached = (type(shards[0])(0, near.address, shards[0].incarnation), shards[1])
        with others[0].ps, others[1].ps, worker.ps:
            works = {w.ps.worker_id: lambda _, w=w: w.step() for w in others}
            with Crew(works) as crew:
                crew.results()
            worker_behind(worker.ps)._session.membership.shards = reached
            # Its push arrives, and what shard 0 says of it never does.
            near.black_hole((DOWN,))
            with Crew({"w0": lambda _: worker.step()}) as crew:
                job.wait_pushed("w0", 1)
                evict(job, proxy, "w0")
                result = crew.results()["w0"]
            core = job.shards[1].model.core
            assert job.ask(lambda: core.closed_sequence(key("w0"))) == 1
            assert (result.outcome, result.rejoined) == ("dropped", True)
            assert worker.value == others[0].value == -1


def test_a_replacement_keeps_the_place(job: Job) -> None:
    with FaultProxy(job.address) as proxy:
        other = worker_of(job, job.address, "w1")
        worker = worker_of(job, proxy.address, "w0")
        evict(job, proxy, "w0")
        other.step()
        replacement = worker_of(job, job.address, "w0")
        with other.ps, replacement.ps:
            assert replacement.ps.clock == 1
            for _ in range(2):
                with pytest.raises(psworker.EvictedError, match="a replacement has"):
                    worker.step()
            with Crew({"w1": lambda _: other.step()}) as crew:
                replacement.step()
                crew.results()
            assert replacement.value == other.value == -2
        worker.ps.close()


class Bystander:
    """Another member in ASP, so that the first may be taken out; it takes no step."""

    def __init__(self, job: Job) -> None:
        self.ps = connect(job, "w1")
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        self.ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))


def _prepared(ps: Connection) -> Any:  # noqa: ANN401, as prepare returns it
    inputs = torch.linspace(-1, 1, SAMPLE_COUNT * 3).reshape(SAMPLE_COUNT, 3)
    data = TensorDataset(inputs, torch.arange(SAMPLE_COUNT))
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return ps.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        DataLoader(data, batch_size=4, shuffle=True),
    )


def _ahead(batches: Iterable[Any], count: int) -> Iterator[Any]:
    drawn = deque[Any]()
    for batch in batches:
        drawn.append(batch)
        if len(drawn) > count:
            yield drawn.popleft()
    yield from drawn


@pytest.mark.parametrize(
    ("is_in_step", "ahead_count"),
    [(True, 0), (False, 0), (True, 2)],
    ids=["in step", "in the loader", "in step, with batches drawn ahead"],
)
def test_an_epoch_goes_on_after_an_eviction_and_each_sample_counts_once(
    tmp_path: Path, is_in_step: bool, ahead_count: int
) -> None:
    counted: dict[str, list[int]] = {"w0": [], "w1": []}
    rejoined: list[str] = []
    is_evicted = threading.Event()
    both = threading.Barrier(2)

    def train(worker_id: str, address: str, proxy: FaultProxy) -> None:
        with connect(job, worker_id, address=address) as ps:
            model, optimizer, loader = _prepared(ps)
            both.wait(20)
            batches = _ahead(loader, ahead_count)
            for count, (inputs, indices) in enumerate(batches):
                if worker_id == "w0" and count == 3:
                    evict(job, proxy, "w0")
                    is_evicted.set()
                is_back = worker_behind(ps)._session.worker.incarnation == 2
                if worker_id == "w0" and count >= 3 and not is_in_step and not is_back:
                    continue  # a batch that is skipped, until the loader notices
                model(inputs).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert ps.last_push is not None
                if ps.last_push.rejoined:
                    rejoined.append(ps.last_push.outcome)
                if not ps.last_push.dropped:
                    counted[worker_id] += indices.tolist()

    with (
        Job(tmp_path, sockets=True) as job,
        FaultProxy(job.address) as proxy,
        Crew(
            {
                "w0": lambda name: train(name, proxy.address, proxy),
                "w1": lambda name: train(name, job.address, proxy),
            }
        ) as crew,
    ):
        crew.results()
        ledger = job.ask(
            lambda: next(iter(job.coordinator.core.ledger._epochs.values()))
        )
        assert ledger.is_closed
    assert is_evicted.is_set()
    assert sorted(counted["w0"] + counted["w1"]) == list(range(SAMPLE_COUNT))
    assert rejoined == (["dropped"] if is_in_step else [])


SCRIPT: Final = """
import torch, psworker
from torch import nn

ps = psworker.connect(connect_timeout_s=60, step_timeout_s=60)
model = nn.ParameterList([torch.zeros(8), torch.zeros(8)])
model, optimizer = ps.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
print("ready", flush=True)
applied = 0
while True:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    push = ps.last_push
    applied += not push.dropped
    if push.rejoined or applied == 1:
        print(push.outcome, push.rejoined, ps.clock, flush=True)
    if push.rejoined:
        break
ps.close()
print(applied, flush=True)
"""


def test_a_gradient_of_both_starts_is_thrown_away(tmp_path: Path) -> None:
    """An accumulation that the loader's rejoining cut in two."""
    counted: list[int] = []
    outcomes: list[str] = []

    def train(worker_id: str) -> None:
        with connect(job, worker_id, address=proxy.address) as ps:
            model, optimizer, loader = _prepared(ps)
            batches: list[int] = []
            for count, (inputs, indices) in enumerate(loader):
                if count == 2:
                    evict(job, proxy, "w0")
                is_back = worker_behind(ps)._session.worker.incarnation == 2
                model(inputs).square().sum().backward()
                batches += indices.tolist()
                if count >= 2 and not is_back:
                    continue  # more is accumulated until the loader notices
                optimizer.step()
                optimizer.zero_grad()
                assert ps.last_push is not None
                outcomes.append(ps.last_push.outcome)
                if not ps.last_push.dropped:
                    counted.extend(batches)
                batches.clear()

    with (
        Job(tmp_path, mode=Mode.ASP, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):
        # Without a loader, so that all data is for one.
        other = Bystander(job)
        with other.ps, Crew({"w0": train}) as crew:
            crew.results()
        ledger = job.ask(
            lambda: next(iter(job.coordinator.core.ledger._epochs.values()))
        )
        assert ledger.is_closed
        # One batch of the new start went with what was left of the old one.
        assert ledger.dropped_count == 4
    assert outcomes.count("dropped") == 1
    assert len(counted) == len(set(counted)) == SAMPLE_COUNT - 4


CRASHING: Final = """
import os, pathlib, sys, torch, psworker
from torch import nn

marker = pathlib.Path(sys.argv[1])
ps = psworker.connect(connect_timeout_s=60, step_timeout_s=60)
model = nn.ParameterList([torch.zeros(8), torch.zeros(8)])
model, optimizer = ps.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
print(ps.worker_id, ps.clock, flush=True)
while ps.clock < 6:
    if ps.clock == 3 and not marker.exists():
        marker.touch()
        os._exit(3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
ps.close()
"""


@pytest.mark.parametrize(
    "given", [(), pytest.param(("--worker-id", "w0"), marks=pytest.mark.repeat)]
)
def test_a_process_that_is_started_again_takes_its_own_place(
    tmp_path: Path, nursery: Nursery, given: tuple[str, ...]
) -> None:
    """And the clock that was open when the one before died."""
    script = tmp_path / "train.py"
    script.write_text(CRASHING)
    with (
        Job(
            tmp_path / "state",
            workers_min=2,
            worker_loss_policy=LossPolicy.WAIT,
            sockets=True,
        ) as job,
        Processes(tmp_path, nursery, launches=True) as processes,
    ):
        processes.start(
            "w0",
            *("-m", "psworker", "run", "--coordinator", job.address),
            *("--max-restarts", "1", *given),
            *("--", str(script), str(tmp_path / "marker")),
        )
        other = worker_of(job, job.address, "w1", start_timeout_s=60)
        with other.ps:
            for _ in range(6):
                assert other.step().outcome == "applied"
            assert other.value == -6
        first, second = processes.line("w0").split(), processes.line("w0").split()
        assert first[0] == second[0]
        assert (first[1], second[1]) == ("0", "3")
        assert not given or first[0] == "w0"
        assert processes.code("w0") == 0


def test_a_process_that_stood_still_for_longer_than_the_lease_goes_on(
    tmp_path: Path, nursery: Nursery
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with (
        Job(tmp_path / "state", lease_ttl_ms=SHORT_LEASE_MS, sockets=True) as job,
        connect(job, "w1") as ps,
        Processes(tmp_path, nursery) as processes,
    ):
        model = nn.ParameterList([torch.zeros(8), torch.zeros(8)])
        model, optimizer = ps.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0)
        )
        steps = 0

        def step() -> None:
            nonlocal steps
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            steps += 1

        processes.start(
            "w0", str(script), PS_COORDINATOR=job.address, PS_WORKER_ID="w0"
        )
        assert processes.line("w0") == "ready"
        step()
        assert processes.line("w0").startswith("applied False")
        processes.send("w0", signal.SIGSTOP)
        job.wait_record(lambda record: len(record.members) == 1)
        step()
        processes.send("w0", signal.SIGCONT)
        job.wait_record(lambda record: len(record.members) == 2)

        assert "True" in processes.line("w0")
        applied = int(processes.line("w0"))
        job.wait_record(lambda record: len(record.members) == 1)
        assert processes.code("w0") == 0
        step()
        final = -float(next(iter(model.parameters())).detach()[0])
        # Each clock is one update of one, whoever contributed to it.
        assert final == ps.clock
        assert ps.last_push is not None
        assert ps.last_push.version == steps + applied
        assert processes.log("w0").count("has joined again") == 1


def test_who_is_cut_off_from_one_shard_holds_nobody_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cut_off: set[str] = set()
    client_of = ShardClients.of

    async def of(clients: ShardClients, shard_index: int) -> ShardPort:
        client = await client_of(clients, shard_index)
        if shard_index == 1 and clients.membership.worker.worker_id in cut_off:
            raise CallError("", "UNAVAILABLE", "cut", refusal=None, decided=False)
        return client

    monkeypatch.setattr(ShardClients, "of", of)
    with ExitStack() as stack:
        job = stack.enter_context(Job(tmp_path, lease_ttl_ms=SHORT_LEASE_MS))
        workers = {name: worker_of(job, job.address, name) for name in ("w0", "w1")}
        for each in workers.values():
            stack.enter_context(each.ps)
        cut_off.add("w0")
        with Crew({"w0": lambda _: workers["w0"].step()}) as crew:
            workers["w1"].step()  # as soon as it is decided
            workers["w1"].step()
            (line,) = [
                record.getMessage()
                for record in caplog.records
                if record.getMessage().startswith("w0/1 is evicted")
            ]
            assert "it can't reach shard 1 at " in line
            assert line.endswith("which w1 reaches")
            left = job.wait_record(lambda record: len(record.members) == 1)
            assert [m.worker for m in left.members] == [key("w1")]
            cut_off.clear()
            crew.results()
        result = workers["w0"].ps.last_push

    assert result is not None
    assert result.rejoined
