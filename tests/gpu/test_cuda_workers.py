"""Workers whose tensors are on CUDA devices; shards stay on the CPU.

The one process to compare with trains on the CPU with the shards' arithmetic, fed with
the gradients that the CUDA workers computed, so that only paramserver can differ.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integration.job import Job, connect, deviation, run_workers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    # torch warns once in each new thread, before it sets the context by itself.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

SEED = 20261128
STEP_COUNT = 30


def make_model() -> nn.Sequential:
    # Not the global seed: workers are threads here, and would share it.
    generator = torch.Generator().manual_seed(SEED)
    model = nn.Sequential(nn.Linear(24, 700), nn.Tanh(), nn.Linear(700, 5))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.2, 0.2, generator=generator)
    return model


def batch(worker_id: str, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED + 1000 * step + int(worker_id[1:]))
    inputs = torch.randn(size, 24, generator=generator)
    return inputs, torch.randint(0, 5, (size,), generator=generator)


def trained(
    job: Job,
    sizes: dict[str, int],
    place: Callable[[nn.Sequential], nn.Sequential],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
) -> tuple[list[torch.Tensor], dict[str, list[list[torch.Tensor]]]]:
    """Parameters after training, and every gradient that was pushed."""

    def work(worker_id: str) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        print(f"seed {SEED}")
        model = place(make_model())
        gradients = []
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(model, optimizer_of(model))
            for step in range(STEP_COUNT):
                inputs, labels = batch(worker_id, step, sizes[worker_id])
                outputs = model(inputs.to("cuda")).float()
                loss = nn.functional.cross_entropy(outputs.cpu(), labels)
                loss.backward()
                gradients.append([p.grad.cpu().clone() for p in model.parameters()])
                optimizer.step(weight=sizes[worker_id])
                optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()], gradients

    results = run_workers(dict.fromkeys(sizes, work), timeout_s=100)
    values = [values for values, _ in results.values()]
    for others in values[1:]:
        for mine, theirs in zip(values[0], others, strict=True):
            assert torch.equal(mine, theirs), "workers hold different values"
    return values[0], {name: gradients for name, (_, gradients) in results.items()}


def expected(
    sizes: dict[str, int],
    gradients: dict[str, list[list[torch.Tensor]]],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    model = make_model().to(dtype).float()  # master values of what was seeded
    optimizer = optimizer_of(model)
    total = sum(sizes.values())
    for step in range(STEP_COUNT):
        for position, parameter in enumerate(model.parameters()):
            mean = sum(
                gradients[worker][step][position].float() * (sizes[worker] / total)
                for worker in sorted(sizes)
            )
            assert isinstance(mean, torch.Tensor)
            parameter.grad = mean
        optimizer.step()
    return [p.detach().to(dtype) for p in model.parameters()]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def test_models_on_cuda_train_to_the_numbers_of_one_process(tmp_path: Path) -> None:
    sizes = {"w0": 7, "w1": 19}
    with Job(tmp_path, shard_count=2, workers_min=2, sockets=True) as job:
        ours, gradients = trained(job, sizes, lambda model: model.to("cuda"), adam)
    worst = deviation(ours, expected(sizes, gradients, adam))
    assert worst <= 1e-6


def test_a_model_in_bfloat16_on_cuda_keeps_its_type(tmp_path: Path) -> None:
    sizes = {"w0": 8}

    def place(model: nn.Sequential) -> nn.Sequential:
        wide = model.to("cuda", torch.bfloat16)
        wide[0].register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
        return wide

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2)

    with Job(tmp_path, shard_count=2, sockets=True) as job:
        ours, gradients = trained(job, sizes, place, sgd)
    assert all(value.dtype == torch.bfloat16 for value in ours)
    worst = deviation(ours, expected(sizes, gradients, sgd, torch.bfloat16))
    # One unit in the last place of bfloat16 is 2^-8 of the value.
    assert worst <= 2**-7


def test_parameters_on_several_devices_stay_where_they_are(tmp_path: Path) -> None:
    sizes = {"w0": 5, "w1": 6}

    def place(model: nn.Sequential) -> nn.Sequential:
        model[0].to("cuda")
        model[2].register_forward_pre_hook(lambda _, inputs: inputs[0].cpu())
        return model

    with Job(tmp_path, shard_count=3, workers_min=2, sockets=True) as job:
        ours, gradients = trained(job, sizes, place, adam)
    worst = deviation(ours, expected(sizes, gradients, adam))
    assert worst <= 1e-6


def test_a_gradient_that_overflows_on_cuda_skips_the_clock(tmp_path: Path) -> None:
    def work(worker_id: str) -> tuple[bool, bool]:
        model = make_model().to("cuda")
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1)
            )
            before = [p.detach().clone() for p in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            if worker_id == "w1":
                model[0].weight.grad[0, 0] = float("inf")
            optimizer.step()
            after = list(model.parameters())
            unchanged = all(map(torch.equal, before, after))
            assert ps.last_push is not None
            return ps.last_push.skipped, unchanged

    with Job(tmp_path, shard_count=2, workers_min=2, sockets=True) as job:
        results = run_workers({"w0": work, "w1": work})
    assert results == {"w0": (True, True), "w1": (True, True)}


def test_buffers_on_cuda_are_kept_equal(tmp_path: Path) -> None:
    def work(worker_id: str) -> list[torch.Tensor]:
        rank = int(worker_id[1:])
        model = nn.Sequential(nn.BatchNorm1d(3)).to("cuda")
        model.register_buffer("table", torch.arange(5.0, device="cuda"))
        with connect(job, worker_id) as ps:
            _, optimizer = ps.prepare(model, adam(model), buffers={"table": "mean"})
            for step in range(3):
                if step == 1:
                    model.get_buffer("table").data.add_(2.0 * rank)
                optimizer.zero_grad()
                inputs = torch.tensor([[0.0], [4.0]], device="cuda") + 10 * rank
                model(inputs.expand(2, 3)).square().sum().backward()
                optimizer.step(weight=1)
        return [buffer.cpu() for buffer in model.buffers()]

    with Job(tmp_path, shard_count=2, workers_min=2, sockets=True) as job:
        results = run_workers({"w0": work, "w1": work})
    for mine, theirs in zip(*results.values(), strict=True):
        assert torch.equal(mine, theirs)
    named = {tuple(each.shape): each for each in results["w0"]}
    # w1 alone has written to the table, and through `.data`.
    assert named[5,].tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert named[()].item() == 3
    # The mean of 2 and 12, with a momentum of 0.1, three times.
    expected = torch.full((3,), 7 * (1 - 0.9**3))
    found = [each for each in results["w0"] if each.shape == (3,)]
    assert any(torch.allclose(each, expected) for each in found)


def overlapped(job: Job, *, overlap: bool, is_clipped: bool) -> list[torch.Tensor]:
    """Parameters after training, on all devices there are."""
    count = torch.cuda.device_count()
    model = make_model()
    model[0].to("cuda:0")
    model[2].to(f"cuda:{count - 1}")
    model[2].register_forward_pre_hook(lambda module, x: x[0].to(module.weight.device))
    with connect(job, "w0") as ps:
        model, optimizer = ps.prepare(model, adam(model), overlap=overlap)
        for step in range(STEP_COUNT):
            inputs, labels = batch("w0", step, 16)
            outputs = model(inputs.to("cuda:0")).cpu()
            nn.functional.cross_entropy(outputs, labels).backward()
            if is_clipped and step % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
        ps.wait()
        return [p.detach().cpu().clone() for p in model.parameters()]


@pytest.mark.parametrize("is_clipped", [False, True])
def test_overlap_on_cuda_changes_no_number(tmp_path: Path, is_clipped: bool) -> None:
    results = []
    for overlap in (False, True):
        with Job(tmp_path / str(overlap), shard_count=2, sockets=True) as job:
            results.append(overlapped(job, overlap=overlap, is_clipped=is_clipped))
    assert all(map(torch.equal, *results))
