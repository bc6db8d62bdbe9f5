"""Models of 3 GiB, and of 100,000 tensors, train; and take the memory they may take.

Each part of the formula of `docs/memory.md` is held against the peak of the processes.
"""

import os
import time
from pathlib import Path
from typing import Final

import pytest
import torch

import psworker
from tests.doubles.resident_memory import MIB, PeakMemory, shared_on_machine
from tests.integration.job import Job, connect, run_workers
from tests.integration.processes import Processes
from tests.integration.test_sizes import (
    Parameters,
    assert_same,
    train,
    train_in_one_process,
)

TENSOR_MIB: Final = 2052
"""More than 2^31 bytes in one tensor."""

MODEL_MIB: Final = 3076
STEP_COUNT: Final = 2
SHARD_COUNT: Final = 2

BASE_MIB: Final = 400
"""A process with torch in it and nothing else takes 210 to 250 MiB; the rest is for
connections and messages on their way."""

KEPT_MIB: Final = 250
"""What glibc keeps of messages over TCP, as processes have it do, and can't give to the
next: 50 to 240 MiB more than where a user's setting leaves glibc its own way."""

FILLING_MIB: Final = 100
"""What this test's worker takes for a block while it makes gradients."""


@pytest.mark.skipif(
    os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 16 << 30,
    reason="needs 16 GiB of free memory",
)
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("is_shared", "is_kept"),
    [(True, True), (False, False), (False, True)],
    ids=["shared memory", "TCP", "TCP, and freed memory is kept"],
)
def test_a_model_of_3_gib_takes_what_the_formula_says(
    *, is_shared: bool, is_kept: bool, tmp_path: Path
) -> None:
    environment = {"PS_SHARED_MEMORY": "1" if is_shared else "0"}
    if not is_kept:
        environment["MALLOC_TRIM_THRESHOLD_"] = str(128 << 10)
    shared_before = shared_on_machine()
    with Processes(tmp_path) as processes:
        listen = "--listen=127.0.0.1:0"
        processes.start_daemon("coordinator", "coordinator", listen, "--shards=2")
        address = processes.address("coordinator")
        names = [f"shard-{index}" for index in range(SHARD_COUNT)]
        for name in names:
            arguments = ("shard", listen, f"--coordinator={address}")
            processes.start_daemon(name, *arguments, **environment)
            processes.address(name)
        script = Path(__file__).with_name("large_model_worker.py")
        sizes = (TENSOR_MIB * MIB, MODEL_MIB * MIB, STEP_COUNT)
        command = [str(each) for each in (script, address, *sizes)]
        processes.start("worker", *command, **environment)
        pids = processes.pids()
        with PeakMemory(pids, shared_before) as seeding:
            assert processes.line("worker", 120) == "seeded"
        with PeakMemory(pids, shared_before) as training:
            steps = [processes.line("worker", 120) for _ in range(STEP_COUNT)]
        assert processes.line("worker", 120) == "equal"
        assert processes.code("worker") == 0

    print(f"\n{'shared memory' if is_shared else 'TCP'}: {', '.join(steps)}")
    for title, peak in (("seeding", seeding), ("training", training)):
        print("\n".join((f"  {title}", *(f"    {line}" for line in peak.lines()))))
    part = MODEL_MIB // SHARD_COUNT
    base = BASE_MIB + (KEPT_MIB if is_kept and not is_shared else 0)
    for name in names:
        # Parameters, and in shared memory the gradient of the only member. In messages
        # its chunks are applied as they come.
        own, shared = (0, 2 * part) if is_shared else (part, 0)
        assert seeding.by_name[name].own / MIB < (0 if is_shared else part) + base
        assert training.by_name[name].own / MIB < own + base
        assert training.by_name[name].shared / MIB < shared + 32
    worker = training.by_name["worker"].own / MIB
    # Parameters, gradients, and messages that are kept until the push is answered.
    assert worker < (2 if is_shared else 3) * MODEL_MIB + base + FILLING_MIB
    # Values on both sides, the gradient, and once more as it is sent.
    assert training.together / MIB < 4 * MODEL_MIB + 3 * base + FILLING_MIB + 64


@pytest.mark.timeout(280)
def test_a_buffer_of_more_than_2_to_the_31_elements(tmp_path: Path) -> None:
    count = (1 << 31) + 5
    model = Parameters(weight=torch.ones(3))
    model.register_buffer("mask", torch.zeros(count, dtype=torch.int8))
    with Job(tmp_path, shard_count=2, sockets=True) as job, connect(job, "w0") as ps:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = ps.prepare(model, optimizer)
        for step in range(2):
            model.weight.grad = torch.ones(3)
            model.mask[-1] = step + 1
            model.mask[1 << 30] = -step - 1
            optimizer.step()
        with psworker.SnapshotReader(job.address) as reader:
            state = reader.latest(timeout=120).state_dict()
    for mask in (model.mask, state["mask"]):
        assert mask.numel() == count
        assert mask[-1] == 2
        assert mask[1 << 30] == -2
        assert int(mask.count_nonzero()) == 2
    assert state["weight"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("tensor_count", [100_000, 200_000])
def test_a_model_of_many_tiny_tensors(tensor_count: int, tmp_path: Path) -> None:
    def build(seed: int) -> torch.nn.Module:
        generator = torch.Generator().manual_seed(seed)
        name = "transformer_encoder_layers_{}_self_attention_projection_weight"
        return Parameters(
            **{
                name.format(index): torch.randn(3, generator=generator)
                for index in range(tensor_count)
            }
        )

    model, exact = build(0), build(0)
    began = time.perf_counter()
    with Job(tmp_path, shard_count=2, sockets=True) as job:
        run_workers({"w0": lambda worker_id: train(job, worker_id, model, 3)}, 250)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    train_in_one_process(exact, 3)
    plain = time.perf_counter() - began
    print(
        f"\n{tensor_count} tensors: {seconds:.1f} s for three steps, torch {plain:.1f}"
    )
    assert_same(model, exact)
