"""The workloads of `psctl bench all`, each in small beside a job in this process."""

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import uvloop
from torch import distributed, nn
from typer.testing import CliRunner

import psserver.bench.apply
import psserver.bench.checkpoint
from psctl.__main__ import app
from psctl.bench.bare_stream import serve
from psctl.bench.machine import free_port
from psctl.bench.member import measure
from psctl.bench.slow_readers import read_once
from psctl.bench.suite import WORKLOADS, workload_named
from psctl.bench.workload import Member, Sizes
from psctl.bench.workloads.big_parameter import LEARNING_RATE
from psctl.failures import CommandError
from psserver.bench.dedupe import push_durations_s
from pswire.exit_codes import ExitCode
from pswire.membership import Mode
from psworker import event_loop
from psworker.transport.control_client import ControlClient
from tests.doubles.job_tokens import JobTokens
from tests.integration.job import Job, connect

SIZES = Sizes(
    mebibyte_count=1,
    parameter_count=2_000_000,
    batch_size=2,
    call_count=2,
    repetition_count=2,
)

# Measured by a process of its own kind; see below.
ELSEWHERE = {"apply", "save", "restore", "recovery"}

# Torch's RPC joins once in a process: `test_bench.py` has it in one of its own.
RPC = "torch_rpc"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@contextmanager
def bare_stream_served(port: int) -> Iterator[None]:
    """The server of the bare stream, on a thread of its own as the daemons are."""
    loop = uvloop.new_event_loop()
    serving = loop.create_task(serve(port, SIZES.element_count, LEARNING_RATE))
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(asyncio.wait([serving]))
    )
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
        loop.close()
    assert serving.cancelled()


def started_job(
    folder: Path,
    shard_count: int,
    mode: Mode,
    checkpoint_url: str | None = None,
    *,
    has_tokens: bool = False,
) -> Job:
    folder.mkdir()
    return Job(
        folder,
        shard_count=shard_count,
        mode=mode,
        sockets=True,
        checkpoint_url=checkpoint_url,
        tokens=JobTokens(folder) if has_tokens else None,
    )


@contextmanager
def stopped_process() -> Iterator[int]:
    """A process in place of the readers, which a workload stops and lets go on."""
    process = subprocess.Popen(["sleep", "300"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "name", [each.name for each in WORKLOADS if each.name not in ELSEWHERE]
)
def test_a_workload_measures_its_contenders_and_compares_their_values(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = workload_named(name)
    entries = tuple(each for each in workload.entries if each.name != RPC)
    workload = replace(workload, entries=entries)
    mode = Mode.ASP if name == "rate" else Mode.BSP
    with ExitStack() as stack:
        job = stack.enter_context(started_job(tmp_path / "one", 1, mode))
        second = job
        if name == "shards":
            second = stack.enter_context(started_job(tmp_path / "two", 2, mode))
        addresses = dict.fromkeys(("fp32", "int8", "topk"), job.address)
        if name == "link":
            for each in addresses:
                own = stack.enter_context(started_job(tmp_path / each, 1, mode))
                addresses[each] = own.address
        beside = job.address
        if name in ("saving", "readers"):
            url = str(tmp_path / "checkpoints")
            with_checkpoints = started_job(tmp_path / name, 1, mode, url)
            beside = stack.enter_context(with_checkpoints).address
        protected = {}
        if name.startswith("secure"):
            # A member leaves what it has proved itself with in its environment.
            stack.enter_context(mock.patch.dict(os.environ))
            protected["plain"] = job.address
            for each in ("tokens", "tls"):  # TLS has tests of its own
                own = started_job(tmp_path / each, 1, mode, has_tokens=True)
                protected[each] = stack.enter_context(own).address
            for each in tuple(protected):
                token = tmp_path / each / "worker" if each != "plain" else ""
                proof = {"PS_TOKEN_FILE": str(token)}
                protected[f"environment of {each}"] = json.dumps(proof)
        stopped = stack.enter_context(stopped_process())
        bare_port = free_port()
        if name == "exchange":
            stack.enter_context(bare_stream_served(bare_port))
        event_loop.acquire()
        stack.callback(event_loop.release)
        places = {
            "coordinator": job.address,
            "shard": job.shard_addresses()[0],
            "one_shard": job.address,
            "two_shards": second.address,
            "dedupe_s": "0.001",
            "bare": str(bare_port),
            "alone": job.address,
            "saving": beside,
            "readers": beside,
            "pid": str(stopped),
            **addresses,
            **protected,
        }
        member = Member(rank=0, count=1, sizes=SIZES, places=places, stack=stack)
        measure(workload, member)
    lines = [
        json.loads(line)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("{")
    ]
    for entry in workload.entries:
        seconds = [line["seconds"] for line in lines if line["contender"] == entry.name]
        assert len(seconds) == 2
        assert min(seconds) > 0


def test_the_shards_apply_is_measured_beside_fused_adam(
    capsys: pytest.CaptureFixture[str],
) -> None:
    psserver.bench.apply.measure(1 << 19, 3, 1)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [line["contender"] for line in lines]
    assert sorted(names) == ["fused"] * 3 + ["shard"] * 3
    assert min(line["seconds"] for line in lines) > 0
    assert {entry.name for entry in workload_named("apply").entries} == set(names)


def test_an_apply_that_computes_something_else_is_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        psserver.bench.apply.ShardApply, "apply", lambda self, gradient: None
    )
    with pytest.raises(AssertionError, match="shard and fused computed different"):
        psserver.bench.apply.measure(1000, 2, 0)


@pytest.mark.parametrize("name", ["save", "restore"])
def test_a_shards_checkpoint_is_measured_beside_safetensors(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"sizes": SIZES.to_json(), "warm_up_count": 1}
    psserver.bench.checkpoint.main(name, "0", json.dumps(settings))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [line["contender"] for line in lines]
    wanted = [entry.name for entry in workload_named(name).entries]
    assert sorted(names) == sorted(2 * wanted)
    assert min(line["seconds"] for line in lines) > 0


def test_a_large_shard_is_read_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    psserver.bench.checkpoint.main("write", str(tmp_path), "2")
    psserver.bench.checkpoint.main("read", str(tmp_path))
    written, read = map(json.loads, capsys.readouterr().out.splitlines())
    assert read["digest"] == written["digest"]
    assert read["byte_count"] == written["byte_count"] > read["own_byte_count"]
    assert read["own_byte_count"] >= 3 * 2 << 20


def test_slow_readers_read_all_of_a_snapshot(tmp_path: Path) -> None:
    async def read(address: str) -> int:
        coordinator = ControlClient(address)
        try:
            return await read_once(coordinator, 1e9)
        finally:
            await coordinator.close()

    with started_job(tmp_path / "job", 2, Mode.BSP) as job, connect(job, "w0") as ps:
        model = nn.Linear(1000, 3)
        ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert asyncio.run(read(job.address)) == 4 * 3003


def test_the_table_of_pushes_is_measured_for_each_push() -> None:
    durations = push_durations_s(8, 5)
    assert len(durations) == 5
    assert min(durations) > 0


def test_a_contender_that_fails_ends_the_workload() -> None:
    def fail(member: Member) -> None:
        raise RuntimeError("it broke")

    workload = workload_named("allreduce2")
    entry = replace(workload.entries[0], begin=fail)  # type: ignore[arg-type]
    broken = replace(workload, entries=(entry,))
    with ExitStack() as stack, pytest.raises(RuntimeError, match="it broke"):
        measure(broken, Member(rank=0, count=1, sizes=SIZES, places={}, stack=stack))


def test_a_workload_that_fails_has_the_end_of_its_log_and_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = workload_named("apply")
    broken = replace(sound, name="broken", member_module="psctl.bench.no_such_module")
    monkeypatch.setattr("psctl.bench.suite.WORKLOADS", (broken, sound))
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["bench", "all", "--repetitions", "2", "--mib", "1", "--out", str(out)]
    )
    assert done.exit_code == ExitCode.ERROR
    first, second = json.loads((out / "bench.json").read_text())["workloads"]
    assert "member 0 ended with exit code 1" in first["failure"]
    assert "No module named psctl.bench.no_such_module" in first["failure"]
    assert first["targets"][0]["is_met"] is None
    assert second["failure"] is None
    assert second["targets"][0]["ratio"] > 0


@pytest.mark.parametrize("is_file", [True, False])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(
    tmp_path: Path, is_file: bool
) -> None:
    out = tmp_path / "out"
    if is_file:
        out.write_text("")
        wanted = f"{out} is a file; name a folder"
    else:
        out = out / "deeper"
        wanted = f"there is no folder {out.parent}; create it"
    done = CliRunner().invoke(app, ["bench", "all", "--out", str(out)])
    assert isinstance(done.exception, CommandError)
    assert str(done.exception) == wanted
