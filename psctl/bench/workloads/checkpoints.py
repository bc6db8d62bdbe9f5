"""What checkpoints and snapshots cost a job, and how fast a lost shard is replaced."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from psctl.bench.workload import (
    CannotRunError,
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    rate_at_least,
    time_at_most,
)
from psctl.bench.workloads.training import Training
from psctl.checkpoints import save_now
from pswire.addresses import parse_address

_SAVE_TIMEOUT_S: Final = 120.0
_STEP_COUNT: Final = 10
"""Steps of a repetition, in which one checkpoint is made: far more often than anybody
would make them."""

_READER_COUNT: Final = 10
_READER_BYTES_PER_S: Final = 4_000_000
_START_TIMEOUT_S: Final = 60.0
_LEASE_TTL_S: Final = 2

_SHARD_LIFE_S: Final = 6.0
"""After which `psserver local` starts a shard again that is killed."""

# A shard's own writing and reading. psserver measures it: the two sides never import.
SAVE: Final = Workload(
    name="save",
    about_s=60,
    title="a shard's part of a checkpoint, 25 million parameters with Adam (286 MiB), "
    "figures of one MiB",
    entries=(
        Entry("shard_synced", "whether finite, written, fsync of file and folders"),
        Entry("save_file_synced", "safetensors.torch.save_file(), fsync of both"),
        Entry("shard", "written with its digests, without fsync"),
        Entry("save_file", "safetensors.torch.save_file(), without fsync"),
    ),
    targets=(
        rate_at_least("shard_synced", 0.8, "save_file_synced"),
        rate_at_least("shard", 0.8, "save_file"),
    ),
    member_module="psserver.bench.checkpoint",
)

RESTORE: Final = Workload(
    name="restore",
    about_s=20,
    title="the same part, read and checked by a shard that begins, figures of one MiB",
    entries=(
        Entry("shard", "read, digests and hyperparameters checked, staged"),
        Entry("load_file", "safetensors.torch.load_file(), and a copy of each tensor"),
    ),
    member_module="psserver.bench.checkpoint",
)


def _two_jobs(name: str, *options: str) -> Callable[[Ground], dict[str, str]]:
    """Starts a job by the name of a contender, with these options, and a plain one."""

    def start(ground: Ground) -> dict[str, str]:
        return {
            "alone": ground.start_job(name="alone", shard_count=2),
            name: ground.start_job(
                name=name,
                shard_count=2,
                options=[each.format(scratch=ground.scratch) for each in options],
            ),
        }

    return start


def _steps(place: str, member: Member) -> Callable[[], None]:
    """Steps of a worker with Adam in a job."""
    ps = member.connect(place)
    training = Training(member, torch.optim.Adam)
    training.model, training.optimizer = ps.prepare(training.model, training.optimizer)
    return training.steps(_STEP_COUNT, ps)


def _steps_alone(member: Member) -> Contender:
    return Contender(_steps("alone", member), amount=_STEP_COUNT)


def _steps_with_a_checkpoint(member: Member) -> Contender:
    steps = _steps("saving", member)
    coordinator = parse_address(member.places["saving"])

    def run() -> float:
        saving = threading.Thread(target=save_now, args=(coordinator, _SAVE_TIMEOUT_S))
        began = time.perf_counter()
        saving.start()
        steps()
        seconds = time.perf_counter() - began
        # Should it last longer, then not into the turn of the other one.
        saving.join()
        return seconds

    return Contender(run, amount=_STEP_COUNT)


SAVING: Final = Workload(
    name="saving",
    about_s=180,
    title="training step of a model of about 25 million parameters with Adam, 1 "
    f"worker, 2 shards, while a checkpoint is made every {_STEP_COUNT} steps",
    entries=(
        Entry(
            "saving",
            "psctl checkpoint save with the first step",
            _steps_with_a_checkpoint,
        ),
        Entry("alone", "a job without checkpoints", _steps_alone),
    ),
    targets=(time_at_most("saving", 1.05, "alone"),),
    start=_two_jobs(
        "saving", "--checkpoint-dir={scratch}/checkpoints", "--checkpoint-keep=1"
    ),
)


def _start_with_readers(ground: Ground) -> dict[str, str]:
    places = _two_jobs("readers")(ground)
    ground.start(
        "slow readers",
        *("psctl.bench.slow_readers", places["readers"], str(_READER_COUNT)),
        str(_READER_BYTES_PER_S),
    )
    return {**places, "pid": str(ground.children.process_id("slow readers"))}


def _steps_beside_readers(member: Member) -> Contender:
    steps = _steps("readers", member)
    pid = int(member.places["pid"])

    def run() -> float:
        os.kill(pid, signal.SIGCONT)
        began = time.perf_counter()
        steps()
        seconds = time.perf_counter() - began
        os.kill(pid, signal.SIGSTOP)
        return seconds

    return Contender(run, amount=_STEP_COUNT)


READERS: Final = Workload(
    name="readers",
    about_s=180,
    title="the same step beside ten readers of snapshots, each at 32 Mbit/s",
    entries=(
        Entry("readers", "stopped but for its turns", _steps_beside_readers),
        Entry("alone", "a job that nobody reads", _steps_alone),
    ),
    targets=(time_at_most("readers", 1.1, "alone"),),
    start=_start_with_readers,
)


def _start_supervised(ground: Ground) -> dict[str, str]:
    ground.start(
        "job",
        *("psserver", "local", "--shards=2", "--listen=127.0.0.1:0"),
        *(f"--state-dir={ground.scratch / 'state'}", f"--lease-ttl={_LEASE_TTL_S}"),
        *(f"--checkpoint-dir={ground.scratch / 'checkpoints'}", "--checkpoint-keep=1"),
    )
    found = ground.children.line_of("job", _START_TIMEOUT_S, re.compile(r"127[.0-9:]+"))
    if found is None:
        raise CannotRunError("psserver local did not report its port")
    pid = ground.children.process_id("job")
    return {"coordinator": found.group(), "pid": str(pid)}


def _shard_of(supervisor_id: int) -> int:
    """Process of the newest shard of a `psserver local`, by what Linux says of it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
            if int(status[1]) == supervisor_id and b"\0shard\0" in command:
                found.append(int(folder.name))
    if not found:
        raise CannotRunError("no shard was found among the processes; is this Linux?")
    return max(found)


def _recovery(member: Member) -> Contender:
    """Kills a shard between two steps, and steps until one is in the values."""
    ps = member.connect()
    model = nn.Linear(member.sizes.parameter_count, 1, bias=False)
    optimizer: Any = torch.optim.Adam(model.parameters())
    model, optimizer = ps.prepare(model, optimizer)
    supervisor_id = int(member.places["pid"])
    started_s = time.monotonic()

    def step() -> str:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return "" if ps.last_push is None else ps.last_push.outcome

    def make_ready() -> None:
        """A checkpoint, and a shard that has lived long enough to be started again."""
        save_now(parse_address(member.places["coordinator"]), _SAVE_TIMEOUT_S)
        while time.monotonic() - started_s < _SHARD_LIFE_S:
            step()

    def run() -> None:
        nonlocal started_s
        os.kill(_shard_of(supervisor_id), signal.SIGKILL)
        while step() != "applied":
            pass
        started_s = time.monotonic()

    step()
    return Contender(run, before=make_ready)


def _process_start(member: Member) -> Contender:
    def run() -> None:
        command = [sys.executable, "-c", "import psserver.shard.daemon"]
        subprocess.run(command, check=True)

    return Contender(run)


RECOVERY: Final = Workload(
    name="recovery",
    about_s=180,
    title="from SIGKILL of one of 2 shards of psserver local to the next acknowledged "
    f"push: 25 million parameters with Adam, lease of {_LEASE_TTL_S} s; to take 5 s at "
    "most",
    entries=(
        Entry("recovery", "all shards return to the checkpoint of before", _recovery),
        Entry(
            "process", "of it: a Python process that imports a shard", _process_start
        ),
    ),
    start=_start_supervised,
)
