import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from psworker.data import LeasedLoader
from psworker.data.order import LoaderRefused, OrderSource, order_digest


def _dataset(count: int = 20) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def test_a_sequential_loader_keeps_the_order_of_the_dataset() -> None:
    source = OrderSource(DataLoader(_dataset(), batch_size=8))
    assert source.draw(7, 0).indices.tolist() == list(range(20))
    assert source.shape.batch_count == 3


def test_a_shuffled_order_follows_from_the_seed_alone() -> None:
    source = OrderSource(DataLoader(_dataset(), batch_size=8, shuffle=True))
    torch.manual_seed(1)
    first = source.draw(7, 0)
    torch.manual_seed(2)
    again = OrderSource(DataLoader(_dataset(), batch_size=8, shuffle=True)).draw(7, 0)
    assert first.indices.tolist() == again.indices.tolist()
    assert sorted(first.indices.tolist()) == list(range(20))
    assert first.indices.tolist() != source.draw(8, 0).indices.tolist()


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
    assert source.draw(7, 0).indices.tolist() == source.draw(7, 1).indices.tolist()
    assert source.draw(7, 0).indices.tolist() != source.draw(8, 0).indices.tolist()
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
    assert order.indices.tolist() == source.draw(7, 0).indices.tolist()


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
    assert source.draw(7, 1).indices.tolist() == [1, 2, 3, 0]


class PairSampler(Sampler[list[int]]):
    length: int | None = None

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def test_a_batch_sampler_of_one_size_can_be_leased() -> None:
    source = OrderSource(
        DataLoader(_dataset(), batch_sampler=PairSampler([[3, 1], [4, 1], [5]]))
    )
    assert source.draw(7, 0).indices.tolist() == [3, 1, 4, 1, 5]
    assert (source.shape.batch_size, source.shape.batch_count) == (2, 3)


def test_torchs_own_batch_sampler_is_taken_apart() -> None:
    sampler = BatchSampler(RandomSampler(_dataset()), 6, drop_last=True)
    source = OrderSource(DataLoader(_dataset(), batch_sampler=sampler))
    assert (source.shape.batch_size, source.shape.batch_count) == (6, 3)
    assert sorted(source.draw(7, 0).indices.tolist()) == list(range(20))


class Named(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return 0

    def __len__(self) -> int:
        return 2


class Subclassed(DataLoader[Any]):
    def __iter__(self) -> Any:  # noqa: ANN401
        return super().__iter__()


class Endless(Sampler[int]):
    """Has no length, or lies about it."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class EndlessBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0]


@pytest.mark.parametrize(
    ("loader", "cause"),
    [
        (
            DataLoader(Named(), batch_size=2, sampler=iter(["a", "b"])),
            "list_iterator has no __len__.*define it",
        ),
        (DataLoader(Named(), batch_size=2, sampler=Endless()), "Endless has no __len_"),
        (
            DataLoader(Named(), batch_sampler=EndlessBatches()),
            "EndlessBatches draws more than 2 batches.*define its __len__",
        ),
        (Subclassed(Named(), batch_size=2), "an __iter__ of its own.*collate_fn"),
    ],
)
def test_a_loader_that_cant_be_leased_is_refused_with_the_cause(
    loader: DataLoader[Any], cause: str
) -> None:
    with pytest.raises(LoaderRefused, match=cause):
        LeasedLoader(loader, cast("Any", None))


def test_a_sampler_that_never_ends_is_refused_when_it_is_drawn() -> None:
    source = OrderSource(DataLoader(Named(), batch_size=2, sampler=Endless(5)))
    with pytest.raises(LoaderRefused, match="drew more than 5 samples"):
        source.draw(7, 0)


def test_batches_that_differ_in_size_are_leased_one_by_one() -> None:
    batches = [[1], [2, 3], [4, 5, 6], [0]]
    source = OrderSource(DataLoader(_dataset(), batch_sampler=PairSampler(batches)))
    order = source.draw(7, 0)
    assert (source.shape.position_count, source.shape.batch_size) == (4, 1)
    assert order.unit == "batches"
    assert [order.at(start, start + 1) for start in range(4)] == batches
    cut_otherwise = [[1, 2], [3], [4, 5, 6], [0]]
    other = OrderSource(
        DataLoader(_dataset(), batch_sampler=PairSampler(cut_otherwise))
    )
    assert other.draw(7, 0).digest != order.digest


@pytest.mark.parametrize(
    ("first", "later", "cause"),
    [
        ([[1], [2, 3]], [[1], [2], [3]], "drew 3 batches, but 2 when it was prepared"),
        ([[1, 2], [3, 4]], [[1, 2], [3], [4]], "another number or size"),
    ],
)
def test_a_batch_sampler_keeps_its_number_of_batches(
    first: list[list[int]], later: list[list[int]], cause: str
) -> None:
    sampler = PairSampler(first)
    sampler.length = 9
    source = OrderSource(DataLoader(_dataset(), batch_sampler=sampler))
    sampler.batches = later
    with pytest.raises(LoaderRefused, match=cause):
        source.draw(7, 0)


def test_without_batches_positions_are_handed_on_as_the_sampler_draws_them() -> None:
    source = OrderSource(DataLoader(_dataset(6), batch_size=None, shuffle=True))
    order = source.draw(7, 0)
    assert not order.is_batched
    assert (source.shape.batch_count, source.shape.batch_size) == (6, 1)
    lists = BatchSampler(RandomSampler(_dataset(10)), 4, drop_last=False)
    source = OrderSource(DataLoader(_dataset(), batch_size=None, sampler=lists))
    order = source.draw(7, 0)
    assert order.is_batched
    assert (source.shape.batch_count, source.shape.batch_size) == (3, 4)
    assert sorted(order.at(0, 4) + order.at(4, 8) + order.at(8, 10)) == list(range(10))


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
