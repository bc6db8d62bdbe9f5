"""Runs: shared by slices with one history, split when histories part."""

import torch

from tests.unit.psserver.shard.tensors.shards import Push, Shards, step_in_one_process


def tensors(count: int, size: int = 3) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter(torch.randn(size, generator=generator)) for _ in range(count)
    ]


def ones(parameters: list[torch.nn.Parameter], *absent: int) -> list[Push]:
    gradients = [
        None if position in absent else torch.ones_like(each)
        for position, each in enumerate(parameters)
    ]
    return [Push("w0", 1, gradients)]


def run_counts(shards: Shards) -> list[int]:
    return [
        shards.engines[chunk.shard_index].run_count("optimizer", chunk.index)
        for chunk in shards.placement.chunks
    ]


def test_two_thousand_tiny_tensors_are_one_run() -> None:
    parameters = tensors(2000)
    optimizer = torch.optim.Adam(parameters)
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=1)
    generator = torch.Generator().manual_seed(5)

    for _ in range(5):
        gradients = [torch.randn(3, generator=generator) for _ in parameters]
        shards.step([Push("w0", 1, gradients)])
        step_in_one_process(optimizer, parameters, [Push("w0", 1, gradients)])

    assert shards.deviation(parameters) <= 1e-6
    assert set(run_counts(shards)) == {1}


def test_four_hundred_groups_keep_their_own_hyperparameters() -> None:
    parameters = tensors(2000)
    optimizer = torch.optim.AdamW(
        [
            {"params": parameters[first : first + 5], "lr": 1e-3 * (1 + first)}
            for first in range(0, 2000, 5)
        ]
    )
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=2)
    generator = torch.Generator().manual_seed(5)

    for _ in range(3):
        gradients = [torch.randn(3, generator=generator) for _ in parameters]
        shards.step([Push("w0", 1, gradients)])
        step_in_one_process(optimizer, parameters, [Push("w0", 1, gradients)])
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    assert shards.deviation(parameters) <= 1e-6
    # A group that lies across two chunks is a run in each.
    assert 400 <= sum(run_counts(shards)) < 400 + len(shards.placement.chunks)


def test_groups_with_equal_values_share_a_run_until_values_differ() -> None:
    parameters = tensors(4)
    optimizer = torch.optim.SGD(
        [{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1, momentum=0.9
    )
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=1)

    shards.step(ones(parameters))
    assert run_counts(shards) == [1]

    optimizer.param_groups[1]["lr"] = 0.2
    shards.step(ones(parameters))
    assert run_counts(shards) == [2]

    optimizer.param_groups[1]["lr"] = 0.1
    shards.step(ones(parameters))
    assert run_counts(shards) == [2]


def test_an_absent_slice_splits_a_run_and_keeps_its_own_count() -> None:
    parameters = tensors(5)
    optimizer = torch.optim.Adam(parameters)
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=1)

    shards.step(ones(parameters))
    shards.step(ones(parameters, 2))
    shards.step(ones(parameters, 2, 3))

    assert run_counts(shards) == [4]
    assert [shards.step_counts(index) for index in range(5)] == [
        {3},
        {3},
        {1},
        {2},
        {3},
    ]


def test_momentum_that_starts_late_meets_slices_that_start_later() -> None:
    parameters = tensors(3)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=1)

    for step in range(12):
        if step == 4:
            optimizer.param_groups[0]["momentum"] = 0.9
            optimizer.param_groups[0]["dampening"] = 0.5
        pushes = ones(parameters, *([1] if step < 8 else []))
        shards.step(pushes)
        step_in_one_process(optimizer, parameters, pushes)

    assert shards.deviation(parameters) <= 1e-6


def test_state_takes_no_memory_before_the_first_update() -> None:
    parameters = tensors(10)
    optimizer = torch.optim.Adagrad(parameters)
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=1)
    assert shards.state_byte_count == 0

    shards.step(ones(parameters, *range(10)))
    assert shards.state_byte_count == 0

    shards.step(ones(parameters))
    float_bytes, element_count, step_count_count = 4, 30, 1
    assert shards.state_byte_count == float_bytes * (element_count + step_count_count)

    shards.step(ones(parameters, 0))
    assert shards.state_byte_count == float_bytes * (element_count + 2)


def test_an_optimizer_leaves_the_parameters_of_another_alone() -> None:
    parameters = tensors(6)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "generator": torch.optim.Adam([parameters[index] for index in (0, 2, 3)]),
        "critic": torch.optim.SGD([parameters[index] for index in (1, 4)], lr=0.1),
    }
    shards = Shards(parameters, optimizers, shard_count=1)
    before = shards.values()

    shards.step(ones(parameters, 1, 4, 5), "generator")
    after = shards.values()
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert changed == [True, False, True, True, False, False]

    shards.step(ones(parameters, 0, 2, 3, 5), "critic")
    changed = [
        not torch.equal(a, b) for a, b in zip(after, shards.values(), strict=True)
    ]
    assert changed == [False, True, False, False, True, False]
    assert shards.step_counts(1, "critic") == {1}
    assert shards.step_counts(1, "generator") == {0}
