"""What every connection promises a script, whatever trains behind it.

The group of `torch.distributed` is one of a single process, whose calls to the others
are those of any group; `test_process_groups.py` starts several. The processes of the
host group are two threads.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import psworker
import psworker.data
from pswire.addresses import parse_address
from pswire.membership import WorkerState
from psworker.backends.group import Group, GroupChannel
from psworker.config import WorkerConfig
from psworker.connection import Connection, LocalConnection
from tests.integration.host_processes import run_group
from tests.integration.job import WAIT_TIMEOUT_S, Job, connect, deviation

Script = Callable[[Connection, int], None]

KINDS: Final = ("local", "job", "group", "group of workers", "host")
"""The backends; a group is one worker, or its processes are workers of their own."""

PROCESS_COUNT: Final = 2
"""Of the host group."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        kind: One of `KINDS`.
        job: The job, but where there is none.
    """

    kind: str
    job: Job | None

    @property
    def is_one_of_several(self) -> bool:
        """Whether processes push as one worker."""
        return self.kind in ("group", "host")

    def run(self, script: Script) -> None:
        """Runs a script within a connection, in all processes there are."""
        if self.kind == "host":
            assert self.job is not None
            run_group(self.job, PROCESS_COUNT, script, worker_id="w0")
            return
        with self._connect() as ps:
            script(ps, 0)

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        model = nn.Linear(4, 2)
        return DistributedDataParallel(model) if self.kind == "group" else model

    def prepare(self, ps: Connection) -> tuple[nn.Module, Any]:
        model = self.model()
        model, optimizer = ps.prepare(model, new_optimizer(model))
        return model, optimizer

    def _connect(self) -> Connection:
        if self.job is None:
            return LocalConnection("w0")
        if self.kind == "job":
            return connect(self.job, "w0")
        config = WorkerConfig(
            coordinator=parse_address(self.job.address),
            worker_id="w0",
            step_timeout_s=WAIT_TIMEOUT_S,
            start_timeout_s=WAIT_TIMEOUT_S,
        )
        return Connection(Group(GroupChannel(WAIT_TIMEOUT_S), config))


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One of this process alone, over a file: no port that others could take."""
    meet = tmp_path_factory.mktemp("group") / "meet"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(params=KINDS)
def way(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    process_group: None,
) -> Iterator[Way]:
    kind: str = request.param
    with ExitStack() as stack:
        job = None if kind == "local" else stack.enter_context(Job(tmp_path))
        yield Way(kind, job)


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401, only a prepared one takes a weight
    **weight: float,
) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step(**weight)


def refused(
    *kinds: type[psworker.PsError], when: bool, match: str
) -> AbstractContextManager[object]:
    return pytest.raises(kinds, match=match) if when else nullcontext()


def test_prepare_returns_what_it_was_given_in_that_order(way: Way) -> None:
    def script(ps: Connection, index: int) -> None:
        model = way.model()
        optimizer = new_optimizer(model)
        scheduler = StepLR(optimizer, 5)
        data = TensorDataset(torch.arange(10))
        loader = DataLoader(data, sampler=DistributedSampler(data, 1, 0), batch_size=4)
        given = (scheduler, loader, model, optimizer)
        first, second, third, last = ps.prepare(*given)
        assert (first, third) == (scheduler, model)
        assert len(second) == len(loader)
        assert isinstance(last, torch.optim.Optimizer)
        assert last.param_groups[0]["lr"] == 0.1

    way.run(script)


def test_a_dict_is_returned_as_one(way: Way) -> None:
    def script(ps: Connection, index: int) -> None:
        model = way.model()
        given = {"net": model, "sgd": new_optimizer(model)}
        made = ps.prepare(given)
        assert list(made) == ["net", "sgd"]
        assert made["net"] is model

    way.run(script)


def test_it_says_where_the_worker_stands(way: Way) -> None:
    def script(ps: Connection, index: int) -> None:
        assert ps.worker_id == "w0"
        assert (ps.clock, ps.generation, ps.last_push) == (0, 0, None)
        for name in ("rank", "worker_count"):
            with pytest.raises(psworker.ConfigurationError, match="once prepare"):
                getattr(ps, name)
        model, optimizer = way.prepare(ps)
        assert (ps.rank, ps.worker_count, ps.clock) == (0, 1, 0)
        assert (ps.worker_id, ps.last_push) == ("w0", None)
        assert ps.generation > 0
        assert ps.mode == ("local" if way.job is None else "bsp")
        for clock in (1, 2):
            step(model, optimizer)
            push = ps.last_push
            assert push is not None
            assert (push.outcome, push.mode) == ("applied", ps.mode)
            assert push.clock == push.version == push.frontier == ps.clock == clock
            assert (push.staleness, push.duplicate) == (0, False)
        assert ps.is_leader or way.kind == "host"
        is_sender = way.job is not None and ps.is_leader
        assert (ps.bytes_sent > 0, ps.bytes_received > 0) == (is_sender, is_sender)
        assert "w0" in repr(ps)
        assert "clock 2" in repr(ps)
        assert ("process" in repr(ps)) == (way.kind not in ("local", "job"))

    way.run(script)


def test_a_weight_weighs_and_0_counts_for_nothing(way: Way) -> None:
    def script(ps: Connection, index: int) -> None:
        model, optimizer = way.prepare(ps)
        before = values_of(model)
        step(model, optimizer, weight=0)
        ps.wait()
        assert ps.clock == 1
        assert deviation(values_of(model), before) == 0.0
        step(model, optimizer, weight=3.0)
        ps.wait()
        expected = [each - 0.1 for each in before]  # the gradient is 1 all over
        assert deviation(values_of(model), expected) < 1e-6
        for wrong in (-1.0, float("nan")):
            with pytest.raises(psworker.ConfigurationError, match="number of samples"):
                optimizer.step(weight=wrong)
        assert ps.clock == 2

    way.run(script)


def test_prepare_again_takes_another_optimizer_or_says_why_not(way: Way) -> None:
    def script(ps: Connection, index: int) -> None:
        model, optimizer = way.prepare(ps)
        step(model, optimizer)
        other = torch.optim.Adam(model.parameters(), lr=0.1)
        with refused(
            psworker.ConfigurationError,
            psworker.UnsupportedError,
            when=way.is_one_of_several,
            match=r"prepare\(\) (was called already|can be called once)",
        ):
            model, optimizer = ps.prepare(model, other)
        step(model, optimizer)
        assert ps.clock == 2

    way.run(script)


def test_values_are_published_or_refused(way: Way) -> None:
    def script(ps: Connection, index: int) -> None:
        if way.job is not None:
            with pytest.raises(psworker.ConfigurationError, match=r"prepare\(\)"):
                ps.publish()
        model, optimizer = way.prepare(ps)
        step(model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
        with refused(
            psworker.UnsupportedError,
            when=way.is_one_of_several,
            match=r"publish\(\) is not possible in a group",
        ):
            ps.publish(model)
            step(model, optimizer, weight=0)
            ps.wait()
            assert all(bool((each == 2.0).all()) for each in model.parameters())

    way.run(script)


def test_a_split_is_recorded_once(way: Way) -> None:
    def script(ps: Connection, index: int) -> None:
        way.prepare(ps)
        cases = ((0, False), (0, False), (1, True))
        for seed, is_other in cases:
            split = psworker.data.split(20, seed=seed)
            if not ps.is_leader:
                with pytest.raises(psworker.ConfigurationError, match="is_leader"):
                    ps.record_split("rows", split)
                continue
            with refused(psworker.SplitError, when=is_other, match="'rows' differs"):
                assert ps.record_split("rows", split) is split

    way.run(script)


def test_after_the_end_everything_is_refused(way: Way) -> None:
    def script(ps: Connection, index: int) -> None:
        model, optimizer = way.prepare(ps)
        step(model, optimizer)
        assert not ps.is_closed
        ps.close()
        ps.close()
        assert ps.is_closed
        assert "closed" in repr(ps)
        for call in (
            optimizer.step,
            ps.wait,
            ps.publish,
            lambda: way.prepare(ps),
            lambda: ps.record_split("rows", psworker.data.split(20)),
        ):
            with pytest.raises(psworker.ClosedError, match="connect"):
                call()
        assert (ps.clock, ps.worker_id) == (1, "w0")
        assert ps.last_push is not None

    way.run(script)
    if way.job is not None:
        way.job.wait_workers(1, WorkerState.LEFT)


def test_who_never_prepared_leaves_too(way: Way) -> None:
    def script(ps: Connection, index: int) -> None:
        ps.close()
        assert ps.is_closed

    way.run(script)


def test_an_error_through_the_context_counts_as_lost(way: Way) -> None:
    def script(ps: Connection, index: int) -> None:
        model, optimizer = way.prepare(ps)
        step(model, optimizer)
        raise OverflowError("of the script")

    with pytest.raises(OverflowError, match="of the script"):
        way.run(script)
    if way.job is not None:
        way.job.wait_workers(1, WorkerState.LOST)
