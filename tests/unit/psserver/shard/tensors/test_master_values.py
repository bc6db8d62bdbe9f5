"""Parameters of 16 bits are trained in float32, and given out in 16 bits."""

from unittest import mock

import pytest
import torch
from torch import nn

from psserver.shard.tensors.contribution import Contribution
from psserver.shard.tensors.shard_optimizers import MasterValues
from psserver.shard.tensors.shard_vectors import ShardVectors
from pswire.placement import place
from pswire.reasons import ErrorReason
from pswire.torch_types import buffer_of
from tests.refusals import refused
from tests.unit.psserver.shard.tensors.shards import Push, Shards, schema_of

NARROW = (torch.bfloat16, torch.float16)


def shards_of(*parameters: nn.Parameter, lr: float = 1.0) -> Shards:
    optimizer = torch.optim.SGD(parameters, lr=lr)
    return Shards(parameters, {"optimizer": optimizer}, shard_count=1)


def narrow(values: list[float], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_updates_below_the_last_place_add_up(dtype: torch.dtype) -> None:
    first = 2.0 ** (8 if dtype is torch.bfloat16 else 11)
    shards = shards_of(narrow([first], dtype))
    half = torch.tensor([0.5], dtype=dtype)
    seen = []

    for _ in range(8):
        shards.step([Push("w0", 1, [half])])
        seen.append(first - float(shards.values()[0]))

    # Below a power of two the distance is 1: a value halfway goes to the even one.
    assert seen == [0.0, 1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 4.0]


def test_the_mean_of_gradients_is_not_rounded_before_the_update() -> None:
    parameter = narrow([0.0], torch.bfloat16)
    shards = shards_of(parameter)
    # 257 is no bfloat16. Twice the difference to the rounded one shows.
    pushes = [
        Push("w0", 1, [torch.tensor([512.0], dtype=torch.bfloat16)]),
        Push("w1", 1, [torch.tensor([2.0], dtype=torch.bfloat16)]),
    ]
    shards.step(pushes)
    shards.step([Push("w0", 1, [torch.tensor([-256.0], dtype=torch.bfloat16)])])
    assert shards.values()[0].tolist() == [-1.0]


@pytest.mark.parametrize("dtype", NARROW)
def test_halves_of_a_batch_equal_one_process_with_master_values(
    dtype: torch.dtype,
) -> None:
    """A mixed model: a body of 16 bits, a norm of float32."""

    def build() -> nn.Sequential:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 8)).to(dtype)
        return model.append(nn.LayerNorm(8))

    def loss_of(model: nn.Sequential, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = model[2](model[1](model[0](inputs.to(dtype))))
        normed: torch.Tensor = model[3](hidden.float())
        return normed.square().mean() * 4 + hidden.float().mean()

    def gradients(model: nn.Sequential, inputs: torch.Tensor) -> list[torch.Tensor]:
        loss = loss_of(model, inputs)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    model, reference = build(), build()
    shards = Shards(
        list(model.parameters()),
        {"optimizer": torch.optim.AdamW(model.parameters(), lr=2e-3)},
        shard_count=2,
    )
    masters = [nn.Parameter(each.detach().float()) for each in reference.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=2e-3)
    generator = torch.Generator().manual_seed(6)

    for _ in range(40):
        halves = torch.randn(2, 16, 24, generator=generator)
        shards.step(
            [
                Push(f"w{rank}", 16, gradients(model, half))
                for rank, half in enumerate(halves)
            ]
        )
        summed = zip(*(gradients(reference, half) for half in halves), strict=True)
        for master, (first, second) in zip(masters, summed, strict=True):
            master.grad = (first.float() + second.float()) / 2
        optimizer.step()
        with torch.no_grad():
            for mine, pulled in zip(model.parameters(), shards.values(), strict=True):
                mine.copy_(pulled)
            for narrowed, master in zip(reference.parameters(), masters, strict=True):
                narrowed.copy_(master)

    # The two walk together, but for a last bit of float32 at a value halfway.
    assert shards.deviation(list(reference.parameters())) <= torch.finfo(dtype).eps
    trained = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    expected = torch.cat([master.detach().flatten() for master in masters])
    first_values = torch.cat(
        [p.detach().float().flatten() for p in build().parameters()]
    )
    moved = (expected - first_values).norm()
    assert float((trained - expected).norm()) <= 0.02 * float(moved)


def test_a_loss_scale_keeps_small_gradients_of_float16() -> None:
    shards = shards_of(narrow([1.0], torch.float16), lr=2.0**14)
    small, scale = 2.0**-26, 2.0**16
    assert torch.tensor([small]).half().item() == 0.0
    data = buffer_of(torch.tensor([small * scale], dtype=torch.float16))
    part = Contribution(
        worker_id="w0", weight=1, presence=(True,), data=data, loss_scale=scale
    )
    for _ in range(4):
        shards.engines[0].apply(
            0,
            optimizer="optimizer",
            contributions=[part],
            total_weight=1,
            hyperparameters=shards.hyperparameters("optimizer"),
        )
    assert shards.values()[0].tolist() == [1.0 - 4 * 2.0**-12]


def test_masters_take_twice_the_bytes_of_trained_chunks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MIN", 64)
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MAX", 64)
    trained = narrow([1.0] * 32, torch.bfloat16)
    frozen = narrow([1.0] * 320, torch.bfloat16)
    wide = nn.Parameter(torch.ones(16))
    shards = Shards(
        [trained, frozen, wide],
        {"optimizer": torch.optim.SGD([trained, wide], lr=1.0)},
        shard_count=1,
    )
    (engine,) = shards.engines
    assert engine.vectors.byte_count == 2 * 352 + 4 * 16
    assert engine.state_byte_count == 4 * 32


def test_frozen_neighbours_in_a_chunk_keep_their_bits() -> None:
    frozen = nn.Parameter(torch.tensor([float("nan"), 3.0]).bfloat16())
    bits = bytes(buffer_of(frozen))
    trained = narrow([1.0], torch.bfloat16)
    optimizer = torch.optim.SGD([trained], lr=1.0)
    shards = Shards([frozen, trained], {"optimizer": optimizer}, shard_count=1)

    shards.step([Push("w0", 1, [None, torch.tensor([0.5]).bfloat16()])])

    assert bytes(buffer_of(shards.values()[0])) == bits
    assert shards.values()[1].tolist() == [0.5]


def test_two_optimizers_of_one_chunk_have_the_same_masters() -> None:
    first, second = (narrow([256.0], torch.bfloat16) for _ in range(2))
    optimizers: dict[str, torch.optim.Optimizer] = {
        "one": torch.optim.SGD([first], lr=1.0),
        "two": torch.optim.SGD([second], lr=1.0),
    }
    shards = Shards([first, second], optimizers, shard_count=1)
    quarter = torch.tensor([0.25], dtype=torch.bfloat16)

    for _ in range(4):
        shards.step([Push("w0", 1, [quarter, None])], "one")
        shards.step([Push("w0", 1, [None, quarter])], "two")

    assert [each.tolist() for each in shards.values()] == [[255.0], [255.0]]
    assert shards.state_byte_count == 2 * 4


def test_no_memory_for_masters_is_said_as_for_values() -> None:
    schema = schema_of([narrow([1.0] * 8, torch.bfloat16)])
    vectors = ShardVectors(place(schema, 1), 0)
    masters = MasterValues(vectors, is_seeded=True)
    with (
        mock.patch("torch.zeros", side_effect=RuntimeError("DefaultCPUAllocator")),
        refused(ErrorReason.LIMIT_EXCEEDED, "shard 0 has no memory for its"),
    ):
        masters.of(0)
    assert masters.byte_count == 0
