"""What belongs together is what has one name, whatever the order it comes in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psworker
from pswire.schema import ModelSchema
from tests.integration.job import Job, connect, run_workers

STEPS = 4


def batch_of(step: int, worker: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator)[4 * worker : 4 * worker + 4]


def pair() -> tuple[nn.Linear, nn.Linear, torch.optim.Adam, torch.optim.Adam]:
    """Two models of equal shapes, with the same seeds on all workers."""
    generator = torch.Generator().manual_seed(0)
    models = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.normal_(generator=generator)
    first, second = (torch.optim.Adam(each.parameters(), lr=0.01) for each in models)
    return *models, first, second


def backward(g: nn.Module, d: nn.Module, x: torch.Tensor) -> None:
    loss: torch.Tensor = g(x).pow(2).mean() + (d(x) - 3).pow(2).mean()
    loss.backward()


def schema_of(job: Job) -> ModelSchema:
    schema = job.ask(lambda: job.coordinator.core.model.schema)
    assert schema is not None
    return schema


def test_models_and_optimizers_of_equal_shapes_are_matched_by_name(
    tmp_path: Path,
) -> None:
    def work(worker_id: str) -> list[torch.Tensor]:
        worker = int(worker_id[1:])
        g, d, og, od = pair()
        with connect(job, worker_id) as ps:
            made: dict[str, Any]
            if worker:
                given = {"opt_d": od, "disc": d, "opt_g": og, "gen": g}
                made = ps.prepare(given, overlap=True)
            else:
                both = ps.prepare(gen=g, disc=d, opt_g=og, opt_d=od)
                made = dict(zip(("gen", "disc", "opt_g", "opt_d"), both, strict=True))
            for step in range(STEPS):
                backward(g, d, batch_of(step, worker))
                for name in ("opt_g", "opt_d"):
                    made[name].step(weight=4)
                    made[name].zero_grad()
            ps.wait()
            return [each.detach().clone() for m in (g, d) for each in m.parameters()]

    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})
        names = {(entry.model, entry.name) for entry in schema_of(job).entries}

    g, d, *optimizers = pair()
    for step in range(STEPS):
        backward(g, d, torch.cat([batch_of(step, worker) for worker in range(2)]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    plain = [each.detach() for m in (g, d) for each in m.parameters()]
    for worker_id in ("w0", "w1"):
        torch.testing.assert_close(results[worker_id], plain, rtol=1e-5, atol=1e-6)
    assert names == {(m, name) for m in ("gen", "disc") for name in ("weight", "bias")}


def test_without_names_another_order_is_refused_with_both(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as first:
        g, d, og, od = pair()
        first.prepare(g, d, og, od)
        with connect(job, "w1") as second:
            g, d, og, od = pair()
            with pytest.raises(
                psworker.SchemaMismatchError, match="first values of the job's model1"
            ):
                second.prepare(d, g, od, og)
            with pytest.raises(
                psworker.OptimizerMismatchError, match="optimizers come in another"
            ):
                second.prepare(g, d, od, og)


def test_a_module_filled_from_a_set_trains_in_the_order_of_the_job(
    tmp_path: Path,
) -> None:
    names = ["query", "key", "value"]

    def work(worker_id: str) -> dict[str, torch.Tensor]:
        worker = int(worker_id[1:])
        order = names[::-1] if worker else names
        layers = {name: nn.Linear(4, 2) for name in order}
        layers["value"].bias = layers["query"].bias  # also by another name first
        with torch.no_grad():
            for position, name in enumerate(names):
                layers[name].weight.fill_(position + 1.0)
                layers[name].bias.zero_()
        model = nn.ModuleDict(layers)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(model, optimizer)
            for step in range(STEPS):
                x = batch_of(step, worker)
                for position, name in enumerate(names):
                    loss = (position + 1) * model[name](x).pow(2).mean()
                    loss.backward()
                optimizer.step(weight=4)
                optimizer.zero_grad()
            assert len(optimizer.state_dict()["state"]) == 5
            return {n: t.clone() for n, t in sorted(model.state_dict().items())}

    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})

    torch.testing.assert_close(results["w0"], results["w1"], rtol=0, atol=0)
    for position, name in enumerate(names):
        moved = (results["w0"][f"{name}.weight"] - (position + 1)).abs().max()
        assert 0 < moved < 0.5 + position, "each began at a value of its own"


def test_a_second_connection_of_one_thread_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        with psworker.connect(job.address) as ps:
            with pytest.raises(
                psworker.ConfigurationError, match=f"already, as worker {ps.worker_id}"
            ):
                psworker.connect(job.address)
            with psworker.connect(job.address, "mine") as other:
                assert other.worker_id == "mine"
        psworker.connect(job.address).close()
