import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from psworker.data.order import LoaderRefused, OrderSource, order_digest


def _dataset(count: int = 20) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def test_a_sequential_loader_keeps_the_order_of_the_dataset() -> None:
    source = OrderSource(DataLoader(_dataset(), batch_size=8))
    assert source.draw(7, 0).tolist() == list(range(20))
    assert source.shape.batch_count == 3


def test_a_shuffled_order_follows_from_the_seed_alone() -> None:
    source = OrderSource(DataLoader(_dataset(), batch_size=8, shuffle=True))
    torch.manual_seed(1)
    first = source.draw(7, 0)
    torch.manual_seed(2)
    again = OrderSource(DataLoader(_dataset(), batch_size=8, shuffle=True)).draw(7, 0)
    assert first.tolist() == again.tolist()
    assert sorted(first.tolist()) == list(range(20))
    assert first.tolist() != source.draw(8, 0).tolist()


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler(range(3, 15)),
        WeightedRandomSampler([0.1, 0.4, 0.5], num_samples=30),
        RandomSampler(_dataset(), replacement=True, num_samples=40),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_samplers_with_a_generator_draw_from_the_seed(
    sampler: WeightedRandomSampler,
) -> None:
    source = OrderSource(DataLoader(_dataset(), batch_size=4, sampler=sampler))
    assert source.draw(7, 0).tolist() == source.draw(7, 1).tolist()
    assert source.draw(7, 0).tolist() != source.draw(8, 0).tolist()
    assert sampler.generator is None


class GlobalRandomSampler(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count):
            yield (
                int(torch.randint(100, ()))
                + random.randrange(100)
                + np.random.randint(9)
            )


def test_a_sampler_without_a_generator_draws_the_same_and_leaves_no_trace() -> None:
    source = OrderSource(
        DataLoader(_dataset(), batch_size=4, sampler=GlobalRandomSampler(12))
    )
    torch.manual_seed(5)
    expected = float(torch.rand(()))
    torch.manual_seed(5)
    order = source.draw(7, 0)
    assert float(torch.rand(())) == expected
    assert order.tolist() == source.draw(7, 0).tolist()


def test_the_epoch_reaches_a_sampler_that_asks_for_it() -> None:
    class Rotating(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter([(self.epoch + step) % 4 for step in range(4)])

    source = OrderSource(DataLoader(_dataset(), batch_size=2, sampler=Rotating()))
    assert source.draw(7, 1).tolist() == [1, 2, 3, 0]


class PairSampler(Sampler[list[int]]):
    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def test_a_batch_sampler_of_one_size_can_be_leased() -> None:
    source = OrderSource(
        DataLoader(_dataset(), batch_sampler=PairSampler([[3, 1], [4, 1], [5]]))
    )
    assert source.draw(7, 0).tolist() == [3, 1, 4, 1, 5]
    assert (source.shape.batch_size, source.shape.batch_count) == (2, 3)


def test_torchs_own_batch_sampler_is_taken_apart() -> None:
    sampler = BatchSampler(RandomSampler(_dataset()), 6, drop_last=True)
    source = OrderSource(DataLoader(_dataset(), batch_sampler=sampler))
    assert (source.shape.batch_size, source.shape.batch_count) == (6, 3)
    assert sorted(source.draw(7, 0).tolist()) == list(range(20))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Named(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return 0

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("loader", "cause"),
    [
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(_dataset(), batch_size=None), "batch_size=None"),
        (
            DataLoader(_dataset(), batch_sampler=PairSampler([[1], [2, 3]])),
            "differ in size",
        ),
        (
            DataLoader(
                _dataset(), batch_size=2, sampler=DistributedSampler(_dataset(), 2, 0)
            ),
            "shuffle=True",
        ),
        (DataLoader(Named(), batch_size=2, sampler=iter(["a", "b"])), "no __len__"),
    ],
)
def test_a_loader_that_cant_be_leased_is_refused_with_the_cause(
    loader: DataLoader[Any], cause: str
) -> None:
    with pytest.raises(LoaderRefused, match=cause):
        OrderSource(loader)


def test_names_instead_of_positions_are_refused() -> None:
    source = OrderSource(DataLoader(Named(), batch_size=2, sampler=["a", "b"]))
    with pytest.raises(LoaderRefused, match="whole numbers"):
        source.draw(7, 0)


def test_a_sampler_that_lies_about_its_length_is_refused() -> None:
    class Short(Sampler[int]):
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[int]:
            return iter([1])

    source = OrderSource(DataLoader(_dataset(), batch_size=2, sampler=Short()))
    with pytest.raises(LoaderRefused, match="drew 1 samples, but its length is 5"):
        source.draw(7, 0)


def test_the_digest_is_that_of_little_endian_int64() -> None:
    order = np.array([1, 2, 3], dtype=np.int64)
    assert order_digest(order) == order_digest(order.astype(">i8"))
    assert order_digest(order) != order_digest(order[::-1].copy())
