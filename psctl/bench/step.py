"""`psctl bench step`: push, apply and pull of one big parameter, beside torch's RPC.

One worker, one shard, TCP on loopback, SGD without momentum. Both sides are measured
in turn within one run, so that whatever else the machine does meets both.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

import torch
from torch import nn
from torch.distributed import rpc

import psworker
from psctl.bench.machine import Spread, free_port, machine, spread, versions
from psctl.bench.rpc_server import (
    SERVER_NAME,
    WORKER_NAME,
    hold,
    join_rpc,
    push_pull,
)
from psctl.daemons import start_daemons
from psctl.failures import CommandError
from psctl.processes import Children, signals_interrupt
from psctl.scratch import scratch_folder

SCHEMA_VERSION: Final = 1

_WARM_UP_COUNT: Final = 3
_LEARNING_RATE: Final = 1e-3


class StepBench(TypedDict):
    """Figures of one run."""

    schema_version: int
    benchmark: str
    mebibyte_count: int
    repetition_count: int
    thread_count: int
    machine: dict[str, object]
    versions: dict[str, str]
    paramserver: Spread
    torch_rpc: Spread
    torch_rpc_over_paramserver: float


@dataclass(frozen=True, slots=True)
class Contender:
    """One of the two that are compared.

    Attributes:
        step: Does one step.
        values: The parameter after it.
    """

    step: Callable[[], None]
    values: Callable[[], torch.Tensor]


def bench_step(
    mebibyte_count: int, repetition_count: int, progress: Callable[[str], None]
) -> StepBench:
    """Measures both; the figures.

    Raises:
        CommandError: A process failed, or the two computed different values.
    """
    torch.manual_seed(0)
    first = torch.randn(mebibyte_count * (1 << 20) // 4)
    gradient = torch.randn_like(first)
    with ExitStack() as stack:
        stack.enter_context(signals_interrupt())
        scratch = stack.enter_context(scratch_folder("paramserver-bench-"))
        children = stack.enter_context(Children(scratch))
        ours = _start_paramserver(stack, children, scratch, first.clone(), gradient)
        theirs = _start_rpc(stack, children, first.clone(), gradient)
        progress(
            f"{mebibyte_count} MiB each way, {repetition_count} repetitions of each, "
            "in turn"
        )
        durations: tuple[list[float], list[float]] = ([], [])
        for repetition in range(_WARM_UP_COUNT + repetition_count):
            for contender, kept in zip((ours, theirs), durations, strict=True):
                began = time.perf_counter()
                contender.step()
                if repetition >= _WARM_UP_COUNT:
                    kept.append(time.perf_counter() - began)
        if not torch.equal(ours.values(), theirs.values()):
            raise CommandError("the two computed different values, which is a bug")
    of_ours, of_theirs = map(spread, durations)
    return StepBench(
        schema_version=SCHEMA_VERSION,
        benchmark="step",
        mebibyte_count=mebibyte_count,
        repetition_count=repetition_count,
        thread_count=torch.get_num_threads(),
        machine=machine(),
        versions=versions(),
        paramserver=of_ours,
        torch_rpc=of_theirs,
        torch_rpc_over_paramserver=round(
            of_theirs["median_ms"] / of_ours["median_ms"], 3
        ),
    )


class _OneParameter(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


def _start_paramserver(
    stack: ExitStack,
    children: Children,
    scratch: Path,
    first: torch.Tensor,
    gradient: torch.Tensor,
) -> Contender:
    coordinator = start_daemons(children, scratch, shard_count=1, worker_count=1)
    ps = stack.enter_context(psworker.connect(str(coordinator), "bench"))
    model = _OneParameter(first)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    model, optimizer = ps.prepare(model, optimizer)
    model.weight.grad = gradient

    def step() -> None:
        optimizer.step()

    return Contender(step, lambda: model.weight.detach())


def _start_rpc(
    stack: ExitStack,
    children: Children,
    first: torch.Tensor,
    gradient: torch.Tensor,
) -> Contender:
    port = free_port()
    children.start("rpc server", ["psctl.bench.rpc_server", str(port)], {})
    join_rpc(WORKER_NAME, 1, port)
    stack.callback(rpc.shutdown)
    rpc.rpc_sync(SERVER_NAME, hold, args=(first, _LEARNING_RATE))
    held = first

    def step() -> None:
        nonlocal held
        held = rpc.rpc_sync(SERVER_NAME, push_pull, args=(gradient,))

    return Contender(step, lambda: held)


def bench_text(figures: StepBench) -> str:
    """The figures for people."""
    ours, theirs = figures["paramserver"], figures["torch_rpc"]
    lines = [
        f"push + apply + pull of {figures['mebibyte_count']} MiB, 1 worker, 1 shard, "
        "TCP on loopback",
        f"{figures['machine']['cpu_model']}, "
        f"{figures['machine']['usable_core_count']} cores",
        "",
        f"{'':24}{'median':>10}{'min':>10}{'max':>10}{'IQR':>10}  ms",
    ]
    for name, of in (("paramserver", ours), ("torch.distributed.rpc", theirs)):
        numbers = (
            of["median_ms"],
            of["min_ms"],
            of["max_ms"],
            of["interquartile_ms"],
        )
        lines.append(f"{name:24}" + "".join(f"{each:10.1f}" for each in numbers))
    lines += ["", f"rpc / paramserver: {figures['torch_rpc_over_paramserver']:.2f}"]
    return "\n".join(lines)
