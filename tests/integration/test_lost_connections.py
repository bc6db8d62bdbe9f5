"""Connections to a shard that are cut in the middle of a push."""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
from torch import nn

from pswire.addresses import Address, parse_address
from tests.doubles.fault_proxy import DOWN, UP, FaultProxy
from tests.integration.job import Job, connect, deviation, run_workers

SEED: Final = 20261128
STEP_COUNT: Final = 12
WEIGHTS: Final = {"w0": 3.0, "w1": 1.0}
ELEMENT_COUNT: Final = 700_000
"""Several chunks for each of two shards, so that a push is many messages."""


def build() -> nn.Module:
    generator = torch.Generator().manual_seed(SEED)
    return nn.ParameterList(
        [
            torch.randn(ELEMENT_COUNT, generator=generator),
            torch.randn(5, generator=generator),
        ]
    )


def fill_gradients(model: nn.Module, worker_id: str, step: int) -> None:
    generator = torch.Generator().manual_seed(step * 10 + int(worker_id[1:]))
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(folder: Path, *, is_cut: bool) -> tuple[list[torch.Tensor], int]:
    """Trains two workers on two shards; the values, and the number of cuts."""
    drawn = random.Random(SEED)
    with ExitStack() as stack:
        proxies: list[FaultProxy] = []

        def through_proxy(address: Address) -> Address:
            proxies.append(stack.enter_context(FaultProxy(str(address))))
            return parse_address(proxies[-1].address)

        advertise = {0: through_proxy, 1: through_proxy} if is_cut else {}
        job = stack.enter_context(Job(folder, workers_min=2, advertise=advertise))

        def work(worker_id: str) -> list[torch.Tensor]:
            model = build()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            with connect(job, worker_id) as ps:
                model, optimizer = ps.prepare(model, optimizer)
                for step in range(STEP_COUNT):
                    fill_gradients(model, worker_id, step)
                    if worker_id == "w0":
                        arm(proxies, drawn)
                    optimizer.step(weight=WEIGHTS[worker_id])
                    assert ps.last_push is not None
                    assert not ps.last_push.dropped
                assert ps.clock == STEP_COUNT
            return values_of(model)

        results = run_workers(dict.fromkeys(WEIGHTS, work))
        assert job.step_counts(0) == {STEP_COUNT}
        for ours, theirs in zip(results["w0"], results["w1"], strict=True):
            assert torch.equal(ours, theirs)
        return results["w0"], sum(proxy.cut_count for proxy in proxies)


def arm(proxies: Sequence[FaultProxy], drawn: random.Random) -> None:
    """Cuts one connection somewhere in the next step, up or down."""
    if proxies:
        byte_count = drawn.randrange(1, ELEMENT_COUNT * 4 // 2)
        proxy = drawn.choice(proxies)
        proxy.cut_after(byte_count, UP if drawn.random() < 0.5 else DOWN)


def in_one_process() -> list[torch.Tensor]:
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    total = sum(WEIGHTS.values())
    for step in range(STEP_COUNT):
        sums = [torch.zeros(each.shape).double() for each in model.parameters()]
        for worker_id, weight in WEIGHTS.items():
            fill_gradients(model, worker_id, step)
            for added, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                added += parameter.grad.double() * (weight / total)
        for added, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = added.float()
        optimizer.step()
    return values_of(model)


def test_cut_pushes_are_applied_exactly_once(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    values, cut_count = train(tmp_path / "cut", is_cut=True)
    assert cut_count >= STEP_COUNT // 2, "too few cuts to show anything"

    untouched, _ = train(tmp_path / "whole", is_cut=False)
    assert all(torch.equal(a, b) for a, b in zip(values, untouched, strict=True))
    assert deviation(values, in_one_process()) <= 1e-6
