"""Processes of one host that push as one worker: numbers, bytes, refusals."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import psworker
import psworker.data
from pswire.activity import Activity
from pswire.membership import Mode
from pswire.security.tokens import new_token
from psworker.backends.host.group_pushes import GroupPushes
from psworker.connection import Connection
from psworker.errors import ConfigurationError, PsError, UnsupportedError
from psworker.optim.push_result import PushResult
from tests.doubles.children import Nursery
from tests.integration.host_processes import connect, run_group
from tests.integration.job import Job, deviation
from tests.integration.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Sequence

STEP_COUNT = 6
SIZES = (5, 3, 8)
"""Samples of each process in a step: the union batch has all of them."""


def new_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 2)
    )


def batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + index)
    x = torch.randn(SIZES[index], 6, generator=draw)
    return x, torch.randn(SIZES[index], 2, generator=draw)


def train(ps: Connection, index: int, model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = ps.prepare(model, optimizer, clip_grad_norm=1.0, buffers="mean")
    for step in range(STEP_COUNT):
        x, y = batch(step, index)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step(weight=SIZES[index])
    assert ps.clock == STEP_COUNT
    assert ps.last_push is not None
    assert ps.last_push.outcome == "applied"
    if ps.is_leader:
        assert ps._backend.work.read().seconds[Activity.WAITING] > 0
    return [each.detach().clone() for each in model.state_dict().values()]


def alone() -> list[torch.Tensor]:
    """One process that computes what the group's processes do, and adds up."""
    model = new_model(seed=0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    total = sum(SIZES)
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        before = [b.clone() for b in model.buffers()]
        after: list[list[torch.Tensor]] = []
        for index, size in enumerate(SIZES):
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            x, y = batch(step, index)
            loss = nn.functional.mse_loss(model(x.double()), y.double())
            (loss * size / total).backward()
            after.append([b.clone() for b in model.buffers()])
        for position, buffer in enumerate(model.buffers()):
            parts = zip(SIZES, after, strict=True)
            mean = sum(each[position] * size / total for size, each in parts)
            assert isinstance(mean, torch.Tensor)
            buffer.copy_(mean)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [each.detach() for each in model.state_dict().values()]


def test_a_group_has_the_numbers_of_one_process_and_repeats_bit_by_bit(
    tmp_path: Path,
) -> None:
    runs: list[Sequence[Sequence[torch.Tensor]]] = []
    for turn in range(2):
        models = [new_model(seed) for seed in range(3)]  # all begin with the first's

        def script(
            ps: Connection, index: int, models: list[nn.Module] = models
        ) -> list[torch.Tensor]:
            return train(ps, index, models[index])

        with Job(tmp_path / f"{turn}", shard_count=2) as job:
            runs.append(run_group(job, 3, script))
    first = runs[0][0]
    for values in (*runs[0], *runs[1]):
        assert all(map(torch.equal, values, first))
    assert deviation(first, alone()) < 2e-5


@pytest.mark.parametrize(("loss", "end"), [("mean", 18.0), ("sum", 54.0)])
def test_a_group_and_a_worker_are_two_workers(
    tmp_path: Path, loss: str, end: float
) -> None:
    def steps(ps: Any, index: int) -> tuple[float, int]:  # noqa: ANN401
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = ps.prepare(model, optimizer, loss=loss)
        count = ps.worker_count  # before anybody may leave
        for _ in range(3):
            model.weight.grad = torch.full((1, 3), -float(index + 1))
            optimizer.step(weight=2.0)
        return float(model.weight.detach().sum()), count

    with Job(tmp_path, shard_count=2, workers_min=2) as job:
        with (
            psworker.connect(job.address, "alone") as ps,
            ThreadPoolExecutor(1) as pool,
        ):
            group = pool.submit(run_group, job, 2, steps)
            mine, count = steps(ps, 2)
            found = group.result()
        assert count == 2
        # (1 + 2 + 3) / 3 a step and weight, or 1 + 2 + 3.
        assert [value for value, _ in found] == pytest.approx([end, end])
        assert mine == pytest.approx(end)


def test_a_group_sends_what_one_worker_sends(tmp_path: Path) -> None:
    def sent(ps: Any, index: int) -> int:  # noqa: ANN401
        model = nn.Linear(1_000, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        for _ in range(4):
            model(torch.ones(1, 1_000)).sum().backward()
            optimizer.step()
        count: int = ps.bytes_sent
        return count

    bytes_by_count = {}
    for count in (1, 3):
        with Job(tmp_path / f"{count}", shard_count=2) as job:
            found = run_group(job, count, sent, shares_memory=False)
            bytes_by_count[count] = sum(found)
    assert bytes_by_count[1] > 4 * 100_000 * 4
    assert bytes_by_count[3] < 1.01 * bytes_by_count[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overlap": True}, "prepare(overlap=True) is not possible with one push per"),
        ({"compression": "int8"}, "compression is not possible with one push per host"),
    ],
)
def test_options_that_a_group_can_not_have_are_refused(
    options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with Job(tmp_path) as job, connect(job, 0, 2) as ps:
        model = nn.Linear(2, 1)
        with pytest.raises(UnsupportedError) as refusal:
            ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        assert text in str(refusal.value)


def test_what_a_group_can_not_do_is_refused(tmp_path: Path) -> None:
    def script(ps: Connection, index: int) -> list[str]:
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
        optimizer: Any = torch.optim.SGD(model[0].parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        model(torch.tensor([index])).sum().backward()
        texts = []
        for call in (
            optimizer.step,
            lambda: optimizer.add_param_group({"params": [model[1].weight]}),
            lambda: ps.prepare(model),
        ):
            with pytest.raises(PsError) as refusal:
                call()
            texts.append(str(refusal.value))
        return texts

    with Job(tmp_path) as job:
        for texts in run_group(job, 2, script):
            assert (
                "a sparse gradient is not possible with one push per host" in texts[0]
            )
            assert "keeps its groups with one push per host" in texts[1]
            assert "prepare() can be called once with one push per host" in texts[2]


def test_two_optimizers_are_refused(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, 0, 2) as ps:
        models = nn.Linear(2, 1), nn.Linear(2, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        with pytest.raises(UnsupportedError, match="2 optimizers are not possible"):
            ps.prepare(*models, *optimizers)


def test_processes_that_prepare_something_else_are_refused(tmp_path: Path) -> None:
    def script(ps: Connection, index: int) -> str:
        model = nn.Linear(2 + index, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if index == 0:
            return ""
        with pytest.raises(ConfigurationError) as refusal:
            ps.prepare(model, optimizer)
        return str(refusal.value)

    with Job(tmp_path) as job, connect(job, 0, 1) as first:
        model = nn.Linear(2, 1)
        first.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with connect(job, 1, 2) as second:
            assert "it has prepared other models, optimizers" in script(second, 1)
        with (
            connect(job, 0, 1) as again,
            pytest.raises(ConfigurationError, match="a living process is number 0"),
        ):
            again.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_process_that_was_told_another_size_of_the_group_is_refused(
    tmp_path: Path,
) -> None:
    with Job(tmp_path) as job, connect(job, 0, 1) as first:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, optimizer = first.prepare(model, optimizer)
        other = nn.Linear(2, 1)
        its_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        with (
            connect(job, 1, 2) as second,
            pytest.raises(ConfigurationError) as refusal,
        ):
            second.prepare(other, its_optimizer)
        assert (
            "its PS_LOCAL_SIZE says 2 processes, that of the others 1; "
            "give all of them the same PS_LOCAL_SIZE"
        ) in str(refusal.value)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert first.clock == 1


def test_every_process_has_the_state_of_the_optimizer(tmp_path: Path) -> None:
    def script(ps: Connection, index: int) -> float:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = ps.prepare(model, optimizer)
        model.weight.grad = torch.full((1, 2), float(index))
        optimizer.step()
        buffer = optimizer.state_dict()["state"][0]["momentum_buffer"]
        model.weight.grad = torch.zeros(1, 2)
        optimizer.step()
        return float(buffer.sum())

    with Job(tmp_path, shard_count=2) as job:
        assert run_group(job, 3, script) == [2.0, 2.0, 2.0]


def test_loading_model_and_optimizer_after_prepare_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, 0, 1) as ps:
        model: Any = nn.Linear(2, 1)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model.load_state_dict(nn.Linear(2, 1).state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(UnsupportedError, match="before prepare"):
            optimizer.step()
        assert ps.clock == 1


@pytest.mark.parametrize("mode", ["ssp", "asp"])
def test_a_group_takes_part_in_other_modes(mode: str, tmp_path: Path) -> None:
    def script(ps: Connection, index: int) -> tuple[float, str]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = ps.prepare(model, optimizer)
        for _ in range(4):
            model.weight.grad = torch.full((1, 2), -float(index))
            optimizer.step()
        return float(model.weight.detach().sum()), ps.mode

    options: dict[str, Any] = {"mode": Mode[mode.upper()]}
    if mode == "ssp":
        options["staleness_bound"] = 1
    with Job(tmp_path, shard_count=2, **options) as job:
        assert run_group(job, 3, script) == [(8.0, mode)] * 3


def test_a_late_push_of_a_group_counts_once_in_a_later_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its leader is lost once the shards have it, and another goes on."""
    are_here, is_late = threading.Barrier(3), threading.Event()
    push = GroupPushes.push

    def lost(pushes: GroupPushes, *args: Any, **options: Any) -> PushResult:  # noqa: ANN401
        before = pushes.sequence_acknowledged
        result = push(pushes, *args, **options)
        assert (before, result.clock) == (0, 6)
        monkeypatch.setattr(GroupPushes, "push", push)
        pushes._session.core.sequence = before  # all that the next leader knows
        raise psworker.StepTimeoutError("the leader is lost")

    monkeypatch.setattr(GroupPushes, "push", lost)

    def prepared(ps: Connection) -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = ps.prepare(model, torch.optim.SGD(model.parameters(), lr=1))
        are_here.wait(60)
        return model, optimizer

    def script(ps: Connection, index: int) -> list[float]:
        model, optimizer = prepared(ps)
        assert is_late.wait(60)
        values = []
        for step in range(2):
            model.weight.grad = torch.full((1, 1), -float(index + 1))
            if not step:
                with pytest.raises(psworker.StepTimeoutError, match="leader is lost"):
                    optimizer.step()
            optimizer.step()
            values.append(float(model.weight.detach()))
        return values

    quorum: dict[str, Any] = {"mode": Mode.QUORUM, "quorum": 1}
    with Job(tmp_path, workers_min=2, **quorum) as job, ThreadPoolExecutor(1) as pool:
        group = pool.submit(run_group, job, 2, script)
        with psworker.connect(job.address, "alone") as ps:
            model, optimizer = prepared(ps)
            for _ in range(5):
                model.weight.grad = torch.full((1, 1), -10.0)
                optimizer.step()
            is_late.set()
            assert group.result(60) == [[51.5, 53.0]] * 2


def test_a_float16_gradient_with_a_loss_scale_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, 0, 1) as ps:
        model = nn.Linear(2, 1).half()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        model.weight.grad = torch.ones(1, 2, dtype=torch.float16)
        optimizer.grad_scale = torch.tensor(8.0)
        with pytest.raises(UnsupportedError, match="float16 gradient that carries a"):
            optimizer.step()


def test_splits_are_recorded_by_who_leads(tmp_path: Path) -> None:
    def script(ps: Connection, index: int) -> bool:
        split = psworker.data.split(40)
        with pytest.raises(ConfigurationError, match="by the process that leads"):
            ps.record_split("rows", split)
        model = nn.Linear(2, 1)
        ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if ps.is_leader:
            assert ps.record_split("rows", split) is split
        return ps.is_leader

    with Job(tmp_path) as job:
        assert run_group(job, 2, script) == [True, False]


def test_state_is_reset_and_groups_stay(tmp_path: Path) -> None:
    def script(ps: Connection, index: int) -> list[float]:
        model: Any = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        counts = []
        for step in range(4):
            if step == 2:
                optimizer.state.clear()
            if step == 3:
                optimizer.state[model.bias]["step"] = 7
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            counts.append(float(optimizer.state[model.bias]["step"]))
        optimizer.param_groups[0]["params"].pop()
        with pytest.raises(PsError, match="keeps its groups with one push per host"):
            optimizer.step()
        return counts

    with Job(tmp_path) as job:
        assert run_group(job, 2, script) == [[1.0, 2.0, 1.0, 8.0]] * 2


MEMBER = """
import signal, torch, psworker
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with psworker.connect(step_timeout_s=60, start_timeout_s=60) as ps:
    model, optimizer = ps.prepare(model, optimizer)
    print("entered", flush=True)
    signal.pause()
"""


def test_a_process_with_another_token_does_not_enter(
    tmp_path: Path, nursery: Nursery
) -> None:
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    with Job(tmp_path, sockets=True) as job, Processes(tmp_path, nursery) as processes:

        def start(index: int, size: int) -> str:
            name = f"process-{index}"
            processes.start(
                *(name, str(script)),
                PS_COORDINATOR=job.address,
                PS_WORKER_ID="host",
                PS_HOST_GROUP=str(tmp_path),
                PS_LOCAL_RANK=str(index),
                PS_LOCAL_SIZE=str(size),
                PS_TOKEN=new_token(),
            )
            return name

        assert processes.line(start(0, 1)) == "entered"
        other = start(1, 2)
        assert processes.code(other) != 0
        assert "it shows another token or certificate" in processes.log(other)
