"""Tensors of every size, type and name that a model may have."""

from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

import psworker
from pswire.limits import GROUP_COUNT_MAX, NAME_BYTES_MAX
from psworker.snapshots.snapshot import Snapshot
from tests.integration.job import Job, connect, deviation, run_workers

SEED: Final = 5
TOLERANCES: Final = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 4e-3}
"""In bfloat16 one unit in the last place is 4e-3 of a value: a last bit of the float32
master value decides how one halfway between two is rounded."""


class Parameters(nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


def odd_model(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    model = Parameters(
        zero_dim=values(),
        empty=values(0, 3),
        one_element=values(1),
        float_64=values(30, 7).double(),
        narrow=values(45, 3).bfloat16(),
        narrow_scalar=values().bfloat16(),
        plain=values(17, 5),
    )
    model.turned = nn.Parameter(values(6, 40).t())
    model.every_other = nn.Parameter(values(9, 8)[:, ::2])
    return model


def fill_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.grad = drawn.to(parameter.dtype)


def train(job: Job, worker_id: str, model: nn.Module, step_count: int) -> nn.Module:
    """SGD with momentum, on the same gradient for every worker."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with connect(job, worker_id) as ps:
        model, optimizer = ps.prepare(model, optimizer)
        for step in range(step_count):
            fill_gradients(model, SEED + step)
            optimizer.step()
    return model


def train_in_one_process(model: nn.Module, step_count: int) -> nn.Module:
    """With master values in float32 for parameters of 16 bits."""
    masters = [
        nn.Parameter(p.detach().float() if p.dtype is torch.bfloat16 else p.detach())
        for p in model.parameters()
    ]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for step in range(step_count):
        fill_gradients(model, SEED + step)
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.to(master.dtype)
        optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
    return model


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), exact in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        found = deviation([mine.detach()], [exact.detach()])
        assert found <= TOLERANCES[exact.dtype], f"{name}, seed {SEED}"


def latest(job: Job) -> Snapshot:
    with psworker.SnapshotReader(job.address) as reader:
        return reader.latest(timeout=20)


@pytest.mark.parametrize("shard_count", [1, 3])
def test_odd_tensors_train_as_in_one_process(shard_count: int, tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=shard_count, workers_min=2, sockets=True) as job:
        models = run_workers(
            {
                f"w{i}": lambda w: train(job, w, odd_model(int(w[1:])), 10)
                for i in (0, 1)
            }
        )
        snapshot = latest(job)
    expected = train_in_one_process(odd_model(0), 10)
    for model in models.values():
        assert_same(model, expected)
        turned = model.get_parameter("turned")
        assert turned.stride() == odd_model(0).get_parameter("turned").stride()
    pulled = odd_model(1)
    pulled.load_state_dict(snapshot.state_dict(), strict=True)
    for ours, theirs in zip(
        pulled.parameters(), models["w0"].parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_a_tensor_of_several_chunks(tmp_path: Path) -> None:
    def build(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        return Parameters(
            before=torch.randn(3, generator=generator),
            large=torch.randn(1000, 1001, generator=generator),
            after=torch.randn(3, generator=generator),
        )

    with Job(tmp_path, shard_count=2, workers_min=2, sockets=True) as job:
        models = run_workers(
            {f"w{i}": lambda w: train(job, w, build(int(w[1:])), 3) for i in (0, 1)}
        )
        chunk_counts = [len(host.model.chunks) for host in job.shards]
    assert sum(chunk_counts) == 4
    for model in models.values():
        assert_same(model, train_in_one_process(build(0), 3))


def test_a_tensor_of_more_than_256_mib(tmp_path: Path) -> None:
    """Takes about 1.7 GB: values and gradient here, values and a push on the shards."""
    element_count = (256 << 18) + 100_003
    model = Parameters(large=torch.zeros(element_count))
    assert element_count * 4 > 256 << 20

    with (
        Job(tmp_path, shard_count=2, sockets=True) as job,
        connect(job, "w0", step_timeout_s=120.0, start_timeout_s=120.0) as ps,
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = ps.prepare(model, optimizer)
        model.large.grad = torch.arange(element_count, dtype=torch.float32)
        optimizer.step()

    model.large.grad.mul_(-0.5)
    assert torch.equal(model.large.detach(), model.large.grad)


@pytest.mark.parametrize("element_count", [0, 1, 3])
def test_a_model_smaller_than_the_number_of_shards(
    element_count: int, tmp_path: Path
) -> None:
    def work(worker_id: str) -> nn.Module:
        return train(job, worker_id, Parameters(few=torch.ones(element_count)), 3)

    with Job(tmp_path, shard_count=3, workers_min=2, sockets=True) as job:
        models = run_workers({"w0": work, "w1": work})
        assert latest(job).clock == 3
    expected = train_in_one_process(Parameters(few=torch.ones(element_count)), 3)
    for model in models.values():
        assert_same(model, expected)


def test_two_thousand_tiny_tensors(tmp_path: Path) -> None:
    def build(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        return Parameters(
            **{f"p{i}": torch.randn(3, generator=generator) for i in range(2000)}
        )

    with Job(tmp_path, shard_count=2, workers_min=2, sockets=True) as job:
        models = run_workers(
            {f"w{i}": lambda w: train(job, w, build(int(w[1:])), 3) for i in (0, 1)}
        )
    for model in models.values():
        assert_same(model, train_in_one_process(build(0), 3))


def test_a_description_larger_than_a_message(tmp_path: Path) -> None:
    """Names of the greatest length, so that 5,000 tensors do for it: 5 MB."""

    def build(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        return Parameters(
            **{
                f"p{i}".ljust(NAME_BYTES_MAX, "_"): torch.randn(2, generator=generator)
                for i in range(5000)
            }
        )

    with Job(tmp_path, shard_count=2, workers_min=2, sockets=True) as job:
        models = run_workers(
            {f"w{i}": lambda w: train(job, w, build(int(w[1:])), 3) for i in (0, 1)}
        )
        snapshot = latest(job)
    expected = train_in_one_process(build(0), 3)
    for model in models.values():
        assert_same(model, expected)
    pulled = build(1)
    pulled.load_state_dict(snapshot.state_dict(), strict=True)
    assert_same(pulled, expected)


def test_more_groups_than_fit_a_push_are_refused(tmp_path: Path) -> None:
    model = Parameters(weight=torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups *= GROUP_COUNT_MAX + 1  # by hand: torch takes a minute
    with (
        Job(tmp_path, sockets=True) as job,
        connect(job, "w0") as ps,
        pytest.raises(psworker.LimitError, match="16385 parameter groups") as refused,
    ):
        ps.prepare(model, optimizer)
    assert "put parameters with the same settings into one group" in str(refused.value)


class Tied(nn.Module):
    """Tied and frozen parameters, and buffers of two types."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder(
            self.frozen(self.norm(self.encoder(tokens)))
        )
        return hidden


def train_tied(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(5):
        generator = torch.Generator().manual_seed(SEED + step)
        tokens = torch.randint(11, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()


def test_tied_and_frozen_parameters_and_buffers(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=2, sockets=True) as job, connect(job, "w0") as ps:
        model = Tied(SEED)
        first = {name: each.clone() for name, each in model.state_dict().items()}
        optimizer = torch.optim.Adam(
            [each for each in model.parameters() if each.requires_grad]
        )
        train_tied(*ps.prepare(model, optimizer))
        snapshot = latest(job)

    expected = Tied(SEED)
    train_tied(
        expected,
        torch.optim.Adam([p for p in expected.parameters() if p.requires_grad]),
    )
    assert_same(model, expected)
    pulled = Tied(SEED + 1)
    pulled.load_state_dict(snapshot.state_dict(), strict=True)
    assert pulled.decoder.weight is pulled.encoder.weight
    assert torch.equal(pulled.encoder.weight, model.encoder.weight)
    assert torch.equal(pulled.frozen.weight, first["frozen.weight"])
    trained = dict(model.named_buffers())
    exact = dict(expected.named_buffers())
    for name, buffer in pulled.named_buffers():
        assert torch.equal(buffer, trained[name])
        assert buffer.dtype == first[name].dtype
        torch.testing.assert_close(buffer, exact[name])


def test_several_models_of_equal_names_in_one_job(tmp_path: Path) -> None:
    def build(seed: int) -> list[nn.Module]:
        generator = torch.Generator().manual_seed(seed)
        return [
            Parameters(weight=torch.randn(4, 3, generator=generator)),
            Parameters(weight=torch.randn(5, generator=generator)),
        ]

    def work(worker_id: str) -> list[nn.Module]:
        one, two = build(int(worker_id[1:]))
        slow = torch.optim.SGD(one.parameters(), lr=0.1)
        fast = torch.optim.Adam(two.parameters(), lr=0.5)
        with connect(job, worker_id) as ps:
            one, slow, two, fast = ps.prepare(one, slow, two, fast)
            alternate([(one, slow), (two, fast)])
            assert ps.clock == 6
        return [one, two]

    with Job(tmp_path, shard_count=2, workers_min=2, sockets=True) as job:
        results = run_workers({"w0": work, "w1": work})
        snapshot = latest(job)
    one, two = build(0)
    alternate(
        [
            (one, torch.optim.SGD(one.parameters(), lr=0.1)),
            (two, torch.optim.Adam(two.parameters(), lr=0.5)),
        ]
    )
    for models in results.values():
        for ours, theirs in zip(models, [one, two], strict=True):
            assert_same(ours, theirs)
    assert snapshot.models == ("model", "model1")
    for name, ours in zip(snapshot.models, results["w0"], strict=True):
        weight = snapshot.state_dict(name)["weight"]
        assert torch.equal(weight, ours.get_parameter("weight"))


def alternate(pairs: list[tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    for step in range(3):
        for model, optimizer in pairs:
            fill_gradients(model, SEED + step)
            optimizer.step()


NAMES: Final = (
    "üñí/\n<b>",
    "\N{TWO DOT LEADER}/etc/passwd",
    "%s{0}$(id)`id`\x1b[31m\0",
    "é" * 512,
    " ",
)


def test_any_name_that_torch_accepts(tmp_path: Path) -> None:
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(NAMES)}
    with Job(tmp_path, shard_count=2, sockets=True) as job:
        model = train(job, "w0/ <i>", Parameters(**tensors), 2)
        snapshot = latest(job)
    assert list(snapshot.state_dict()) == list(tensors)
    snapshot.save(tmp_path / "model.safetensors")
    pulled = Parameters(**tensors)
    pulled.load_state_dict(snapshot.state_dict(), strict=True)
    assert_same(pulled, model)
    written = {each.name for each in tmp_path.iterdir()}
    assert written <= {"coordinator", "shard-0", "shard-1", "model.safetensors"}


@pytest.mark.parametrize("class_name", ["SGD", "SparseAdam"])
def test_rows_are_cut_by_chunks_of_full_size(class_name: str, tmp_path: Path) -> None:
    """A row of 100 elements and a chunk of 2^18: three chunks cut three rows."""

    def step(table: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
        for first in (2620, 5240, 7862):
            rows = torch.arange(first, first + 4)
            table.zero_grad()
            table(rows).square().sum().backward()
            optimizer.step()

    generator = torch.Generator().manual_seed(SEED)
    values = torch.randn((9000, 100), generator=generator)
    plain, table = (
        nn.Embedding.from_pretrained(values.clone(), freeze=False, sparse=True)
        for _ in range(2)
    )
    make = getattr(torch.optim, class_name)
    step(plain, make(plain.parameters(), lr=0.1))
    with Job(tmp_path, sockets=True) as job, connect(job, "w0") as ps:
        table, optimizer = ps.prepare(table, make(table.parameters(), lr=0.1))
        sent = ps.bytes_sent
        step(table, optimizer)
        assert ps.bytes_sent - sent < 3 * 10_000
        cuts = [
            chunk.element_count for host in job.shards for chunk in host.model.chunks
        ]

    assert len(cuts) == 4
    assert any(count % 100 for count in cuts)
    assert deviation([table.weight.detach()], [plain.weight.detach()]) <= 1e-6
    assert torch.equal(table.weight.detach()[:2620], values[:2620])
