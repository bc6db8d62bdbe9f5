"""Children of a process whose steps overlap, and who reads its model while one does."""

import logging
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import psworker
from psworker.connection import Connection
from psworker.errors import UnsupportedError
from tests.integration.job import Job, connect

if TYPE_CHECKING:
    from tests.doubles.children import Nursery

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")

IS_ALONE = "PS_TEST_FORKS_ALONE"
CHILD_TIMEOUT_S = 60.0


@pytest.fixture(name="job")
def one_worker_job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path / "state", sockets=True) as job:
        yield job


def prepared(ps: Connection, *layers: nn.Module) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared: tuple[Any, Any] = ps.prepare(model, optimizer, overlap=True)
    return prepared


def step(model: Any, optimizer: Any) -> None:  # noqa: ANN401
    optimizer.zero_grad()
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step(weight=1)


def told_by_child(work: Callable[[], object]) -> str:
    """What a forked child says of some work, which ends or is ended."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            told = f"{work()}"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(write, told.encode()[:4000])
        os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], CHILD_TIMEOUT_S)
        if not ready:
            os.kill(child, signal.SIGKILL)
        return os.read(read, 4000).decode()
    finally:
        os.waitpid(child, 0)
        os.close(read)


def test_a_child_forked_after_a_step_has_its_values(
    job: Job, request: pytest.FixtureRequest
) -> None:
    """In a process of its own: other tests leave threads in this one."""
    if IS_ALONE not in os.environ:
        name = f"{__file__}::{test_a_child_forked_after_a_step_has_its_values.__name__}"
        nursery: Nursery = request.getfixturevalue("nursery")
        done = nursery.run(
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"),
            # A plugin of anyio, which the nursery has imported for the daemons.
            "-Wignore:Module already imported so cannot be rewritten; anyio",
            name,
            environment={IS_ALONE: "1"},
        )
        assert done.returncode == 0, done.stdout
        return
    with connect(job, "w0") as ps:
        model, optimizer = prepared(ps)
        x = torch.ones(1, 4)
        cases: list[tuple[Callable[[], object], Callable[[], str]]] = [
            (lambda: model(x).item(), lambda: f"{model(x).item()}"),
            (lambda: len(model.state_dict()), lambda: "4"),
            (ps.close, lambda: "None"),
            (ps.wait, lambda: "None"),
            (lambda: ps.clock, lambda: f"{ps.clock}"),
        ]
        for work, expected in cases:
            step(model, optimizer)
            assert told_by_child(work) == expected()
        for refused in (optimizer.state_dict, lambda: step(model, optimizer)):
            step(model, optimizer)
            assert told_by_child(refused).startswith("ClosedError: this process was")
        step(model, optimizer)
        assert ps.clock == 8


def test_a_child_takes_no_local_steps(job: Job) -> None:
    """Nobody would make its pushes: the thread that does is not in it."""
    with connect(job, "w0") as ps:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = psworker.StreamingDiLoCo(4, fragment_count=2, taken_after=2)
        ps.prepare(model, optimizer, strategy=strategy)
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        said = told_by_child(optimizer.step)
        assert said.startswith("ClosedError: this process was forked"), said
        optimizer.step()
        assert ps.clock in (1, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_model_is_exported_while_a_step_is_under_way(job: Job) -> None:
    with connect(job, "w0") as ps:
        model, optimizer = prepared(ps)
        x = torch.randn(2, 4)
        step(model, optimizer)
        exported = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(exported(x), model(x))
        step(model, optimizer)
        with pytest.raises(UnsupportedError, match=r"state_dict\(\)"):
            torch.jit.script(model)
        step(model, optimizer)
        assert ps.clock == 3


def test_buffers_that_go_with_each_step_are_no_reason_to_send_nothing_ahead(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "psworker"), connect(job, "w0") as ps:
        model, optimizer = prepared(ps, nn.BatchNorm1d(8))
        for _ in range(15):
            step(model, optimizer)
        assert ps.clock == 15
    assert "gradients are sent in step() from now on" not in caplog.text
