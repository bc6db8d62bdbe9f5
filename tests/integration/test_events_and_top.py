"""`psctl events` and `psctl top` beside a running job, for scripts and for people."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from psctl import status
from psctl.__main__ import app
from psctl.events import followed
from pswire.addresses import parse_address
from pswire.exit_codes import ExitCode
from tests.doubles.fault_proxy import FaultProxy
from tests.doubles.free_addresses import free_address
from tests.doubles.terminal import Terminal
from tests.integration.job import WAIT_TIMEOUT_S, Job, connect


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that one worker has trained for a step, and left."""
    folder = tmp_path_factory.mktemp("events")
    with Job(folder, shard_count=1, sockets=True) as found:
        train(found)
        yield found


def printed(job: Job, *arguments: str) -> list[str]:
    line = ["events", "--coordinator", job.address, *arguments]
    done = CliRunner().invoke(app, line, catch_exceptions=False)
    assert done.exit_code == ExitCode.DONE, done.output
    return done.stdout.splitlines()


def test_events_are_lines_of_json_for_scripts(job: Job) -> None:
    events = [json.loads(line) for line in printed(job, "--json")]
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "coordinator_started"
    assert kinds.index("worker_joined") < kinds.index("worker_left")
    numbers = [event["number"] for event in events]
    assert numbers == sorted({*numbers})

    rest = printed(job, "--json", "--after", str(numbers[1]))
    found = [json.loads(line)["number"] for line in rest]
    assert found[: len(numbers) - 2] == numbers[2:]


def test_events_are_sentences_for_people(job: Job) -> None:
    (line,) = [each for each in printed(job) if "worker_joined" in each]
    assert line.endswith("w0 has joined")


def test_events_of_a_job_that_is_not_there_end_as_other_commands_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status, "CONNECT_TIMEOUT_S", 0.2)
    for more in ([], ["--follow"]):
        line = ["events", "--coordinator", str(free_address()), *more]
        done = CliRunner().invoke(app, line)
        assert type(done.exception).__name__ == "ConnectError"


def train(job: Job) -> None:
    """A worker that makes a step."""
    with connect(job, "w0") as ps:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def test_events_go_on_over_lost_connections_and_a_restart(tmp_path: Path) -> None:
    with (
        Job(tmp_path, shard_count=1, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):

        async def all_events() -> list[tuple[int, str]]:
            found = []
            async with (
                asyncio.timeout(WAIT_TIMEOUT_S),
                aclosing(
                    followed(parse_address(proxy.address), 0, lambda _: None)
                ) as events,
            ):
                async for event in events:
                    number, kind = event["number"], event["kind"]
                    found.append((number, kind))
                    if kind == "shard_registered":
                        proxy.reset()
                        await asyncio.to_thread(train, job)
                    elif kind == "worker_left":
                        await asyncio.to_thread(job.stop_coordinator)
                        await asyncio.to_thread(job.start_coordinator)
                    elif kind == "coordinator_started" and number > 1:
                        break
            return found

        found = asyncio.run(all_events())
    assert found == sorted({*found}), "each once, and in order"
    kinds = [kind for _, kind in found]
    assert kinds.count("coordinator_started") == 2
    assert {"worker_joined", "worker_left"} < {*kinds}


def test_top_on_no_terminal_is_one_look(job: Job) -> None:
    done = CliRunner().invoke(app, ["top", "--coordinator", job.address])
    assert done.exit_code == ExitCode.DONE, done.output
    assert "SHARD" in done.stdout
    assert "\x1b" not in done.stdout
    assert "one look" in done.stderr


def test_top_takes_the_screen_and_gives_it_back(job: Job) -> None:
    terminal = Terminal(
        *(sys.executable, "-m", "psctl", "top"),
        environment={"PS_COORDINATOR": job.address, "PYTHONIOENCODING": "utf-8"},
    )
    try:
        parts = ("SHARD", "workers 1 to", "q quit")
        terminal.until(lambda text: all(each in text for each in parts))
        assert terminal.modes != terminal.modes_before
        terminal.press(b"\t")
        terminal.until(lambda text: "shards 1 to 1 of 1" in text)
        terminal.press(b"q")
        assert terminal.process.wait(WAIT_TIMEOUT_S) == ExitCode.DONE
        assert terminal.modes == terminal.modes_before
        terminal.until(lambda _: b"\x1b[?1049l" in terminal.raw)
    finally:
        terminal.close()


def test_a_launcher_shows_the_job_below_what_its_script_prints(
    job: Job, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time, pathlib\n"
        "for number in range(30):\n    print('line', number, flush=True)\n"
        f"while not pathlib.Path({str(tmp_path / 'enough')!r}).exists():\n"
        "    time.sleep(0.01)\n"
        "print('last line', flush=True)\n"
    )
    terminal = Terminal(
        *(sys.executable, "-m", "psworker", "run", "--", str(script)),
        environment={"PS_COORDINATOR": job.address},
    )
    try:
        terminal.until(
            lambda text: (
                "line 29" in text
                and terminal.screen.display[-1].startswith("job finished")
            )
        )
        (tmp_path / "enough").touch()
        terminal.until(lambda text: "last line" in text)
        assert terminal.process.wait(WAIT_TIMEOUT_S) == ExitCode.DONE
        # The shell has all rows again.
        text = terminal.until(
            lambda text: "job finished" not in text and terminal.screen.margins is None
        )
        assert "last line" in text
    finally:
        terminal.close()
