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
    assert source.begin(0).order(7).indices.tolist() == list(range(20))
    assert source.shape().batch_count == 3


def test_a_shuffled_order_follows_from_the_seed_alone() -> None:
    source = OrderSource(DataLoader(_dataset(), batch_size=8, shuffle=True))
    torch.manual_seed(1)
    first = source.begin(0).order(7)
    torch.manual_seed(2)
    again = (
        OrderSource(DataLoader(_dataset(), batch_size=8, shuffle=True))
        .begin(0)
        .order(7)
    )
    assert first.indices.tolist() == again.indices.tolist()
    assert sorted(first.indices.tolist()) == list(range(20))
    assert first.indices.tolist() != source.begin(0).order(8).indices.tolist()


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
    assert (
        source.begin(0).order(7).indices.tolist()
        == source.begin(1).order(7).indices.tolist()
    )
    assert (
        source.begin(0).order(7).indices.tolist()
        != source.begin(0).order(8).indices.tolist()
    )
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


def _global_states() -> tuple[float, float, float]:
    """The next random numbers of all that a sampler may draw from."""
    return float(torch.rand(())), random.random(), float(np.random.rand())


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def test_a_sampler_without_a_generator_draws_the_same_from_the_jobs_seed() -> None:
    source = OrderSource(
        DataLoader(_dataset(), batch_size=4, sampler=GlobalRandomSampler(12))
    )
    _seed_all(5)
    first = source.begin(0).order(7)
    _seed_all(6)
    assert first.indices.tolist() == source.begin(0).order(7).indices.tolist()


def _samplers(generator: torch.Generator | None) -> dict[str, Any]:
    data = _dataset()
    return {
        "random": RandomSampler(data, generator=generator),
        "more": RandomSampler(data, num_samples=50, generator=generator),
        "again": RandomSampler(
            data, replacement=True, num_samples=70, generator=generator
        ),
        "subset": SubsetRandomSampler(range(3, 15), generator=generator),
        "weighted": WeightedRandomSampler([0.1, 0.4, 0.5], 30, generator=generator),
        "global": GlobalRandomSampler(12),
        "sequence": [3, 1, 2],
        "wrapped": BatchSampler(RandomSampler(data, generator=generator), 3, True),
    }


@pytest.mark.parametrize("owner", ["default", "generator"])
@pytest.mark.parametrize("name", list(_samplers(None)))
def test_an_order_and_the_random_numbers_after_it_are_those_of_the_sampler(
    name: str, owner: str
) -> None:
    def make() -> tuple[Any, torch.Generator | None]:
        _seed_all(5)
        own = torch.Generator().manual_seed(3) if owner == "generator" else None
        return _samplers(own)[name], own

    sampler, own = make()
    expected = [list(sampler) for _ in range(3)]
    numbers = _global_states(), own and float(torch.rand((), generator=own))

    sampler, own = make()
    batch_size = None if name == "wrapped" else 4
    source = OrderSource(DataLoader(_dataset(), batch_size, sampler=sampler))
    drawn = []
    for epoch in range(3):
        draw = source.begin(epoch)
        drawn.append(draw.order(draw.own).indices.tolist())
        draw.end()
    if name == "wrapped":
        expected = [[n for batch in each for n in batch] for each in expected]
    assert drawn == expected
    assert numbers == (_global_states(), own and float(torch.rand((), generator=own)))


@pytest.mark.parametrize("owner", ["default", "generator"])
@pytest.mark.parametrize("is_seeded", [False, True], ids=["opener", "seed"])
@pytest.mark.parametrize("name", list(_samplers(None)))
def test_others_draw_the_openers_order_and_take_their_own_random_numbers(
    name: str, owner: str, is_seeded: bool
) -> None:
    def make(seed: int) -> tuple[OrderSource, torch.Generator | None]:
        _seed_all(seed)
        own = torch.Generator().manual_seed(seed) if owner == "generator" else None
        batch_size = None if name == "wrapped" else 4
        sampler = _samplers(own)[name]
        return OrderSource(DataLoader(_dataset(), batch_size, sampler=sampler)), own

    source, _ = make(5)
    opened = source.begin(0)
    origin = 9 if is_seeded else opened.own
    expected = opened.order(origin).indices.tolist()

    source, own = make(6)
    alone = source.begin(0)
    alone.order(alone.own)
    alone.end()
    numbers = _global_states(), own and float(torch.rand((), generator=own))

    source, own = make(6)
    draw = source.begin(0)
    assert draw.order(origin).indices.tolist() == expected
    # Opened again, as by a worker that has joined again.
    assert draw.order(origin).indices.tolist() == expected
    draw.end()
    assert numbers == (_global_states(), own and float(torch.rand((), generator=own)))


def test_an_epoch_that_is_left_early_takes_the_random_numbers_of_a_plain_one() -> None:
    """A shuffling sampler draws once more where it ends."""
    own = torch.Generator().manual_seed(3)
    plain = DataLoader(_dataset(), batch_size=4, shuffle=True, generator=own)
    next(iter(plain))
    expected = torch.rand((), generator=own)
    own.manual_seed(3)
    source = OrderSource(plain)
    torch.empty((), dtype=torch.int64).random_(generator=own)  # of the processes
    draw = source.begin(0)
    draw.order(draw.own)
    assert torch.equal(torch.rand((), generator=own), expected)


class CountingBatches(Sampler[list[int]]):
    """Counts its epochs, as some draw by."""

    def __init__(self, count: int | None = None) -> None:
        self.epoch = 0
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        return iter([[self.epoch, 0], [1, 2]])

    def __len__(self) -> int:
        return 2


class Uncopied(CountingBatches):
    def __deepcopy__(self, memo: object) -> "Uncopied":
        raise TypeError("holds a lock")


@pytest.mark.parametrize("kind", [CountingBatches, Uncopied])
@pytest.mark.parametrize("is_batch_sampler", [False, True])
def test_a_sampler_that_counts_its_epochs_begins_with_the_first(
    kind: type[CountingBatches], is_batch_sampler: bool
) -> None:
    sampler: Any = kind()
    source = OrderSource(
        DataLoader(_dataset(), batch_sampler=sampler)
        if is_batch_sampler
        else DataLoader(_dataset(), batch_size=None, sampler=sampler)
    )
    assert (source.shape().batch_count, sampler.epoch) == (2, 0)
    for epoch in range(3):
        draw = source.begin(epoch)
        # Of the epoch that a job's seed has drawn as well.
        origin = draw.own if epoch != 1 else 7
        assert draw.order(origin).indices[0] == epoch + 1
        assert sampler.epoch == epoch + 1


def test_a_data_set_that_grows_or_shrinks_counts_from_the_next_epoch_on() -> None:
    class Growing(Dataset[int]):
        count = 6

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> int:
            return index

    data = Growing()
    source = OrderSource(DataLoader(data, batch_size=4, shuffle=True))
    for count, batch_count in ((6, 2), (9, 3), (3, 1)):
        data.count = count
        draw = source.begin(0)
        assert source.shape().batch_count == batch_count
        order = draw.order(draw.own)
        assert sorted(order.indices.tolist()) == list(range(count))


def test_a_batch_sampler_whose_length_tells_another_number_of_batches() -> None:
    sampler = PairSampler([[1, 2], [3, 4]])
    sampler.length = 2
    source = OrderSource(DataLoader(_dataset(), batch_sampler=sampler))
    sampler.batches, sampler.length = [[1], [2, 3], [4]], 3
    draw = source.begin(1)
    assert draw.shape.batch_count == 3
    assert draw.order(draw.own).unit == "batches"


def test_a_batch_size_that_is_set_on_the_batch_sampler_counts() -> None:
    loader = DataLoader(_dataset(), batch_size=4)
    source = OrderSource(loader)
    loader.batch_sampler.batch_size = 10  # type: ignore[union-attr]
    assert source.begin(0).shape.batch_count == 2


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
    assert source.begin(1).order(7).indices.tolist() == [1, 2, 3, 0]


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
    assert source.begin(0).order(7).indices.tolist() == [3, 1, 4, 1, 5]
    assert (source.shape().batch_size, source.shape().batch_count) == (2, 3)


def test_torchs_own_batch_sampler_is_taken_apart() -> None:
    sampler = BatchSampler(RandomSampler(_dataset()), 6, drop_last=True)
    source = OrderSource(DataLoader(_dataset(), batch_sampler=sampler))
    assert (source.shape().batch_size, source.shape().batch_count) == (6, 3)
    assert sorted(source.begin(0).order(7).indices.tolist()) == list(range(20))


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
        source.begin(0).order(7)


def test_batches_that_differ_in_size_are_leased_one_by_one() -> None:
    batches = [[1], [2, 3], [4, 5, 6], [0]]
    source = OrderSource(DataLoader(_dataset(), batch_sampler=PairSampler(batches)))
    order = source.begin(0).order(7)
    assert (source.shape().position_count, source.shape().batch_size) == (4, 1)
    assert order.unit == "batches"
    assert [order.at(start, start + 1) for start in range(4)] == batches
    cut_otherwise = [[1, 2], [3], [4, 5, 6], [0]]
    other = OrderSource(
        DataLoader(_dataset(), batch_sampler=PairSampler(cut_otherwise))
    )
    assert other.begin(0).order(7).digest != order.digest


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
        source.begin(0).order(7)


def test_without_batches_positions_are_handed_on_as_the_sampler_draws_them() -> None:
    source = OrderSource(DataLoader(_dataset(6), batch_size=None, shuffle=True))
    order = source.begin(0).order(7)
    assert not order.is_batched
    assert (source.shape().batch_count, source.shape().batch_size) == (6, 1)
    lists = BatchSampler(RandomSampler(_dataset(10)), 4, drop_last=False)
    source = OrderSource(DataLoader(_dataset(), batch_size=None, sampler=lists))
    order = source.begin(0).order(7)
    assert order.is_batched
    assert (source.shape().batch_count, source.shape().batch_size) == (3, 4)
    assert sorted(order.at(0, 4) + order.at(4, 8) + order.at(8, 10)) == list(range(10))


def test_names_instead_of_positions_are_refused() -> None:
    source = OrderSource(DataLoader(Named(), batch_size=2, sampler=["a", "b"]))
    with pytest.raises(LoaderRefused, match="whole numbers"):
        source.begin(0).order(7)


def test_a_sampler_that_lies_about_its_length_is_refused() -> None:
    class Short(Sampler[int]):
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[int]:
            return iter([1])

    source = OrderSource(DataLoader(_dataset(), batch_size=2, sampler=Short()))
    with pytest.raises(LoaderRefused, match="drew 1 samples, but its length is 5"):
        source.begin(0).order(7)


def test_the_digest_is_that_of_little_endian_int64() -> None:
    order = np.array([1, 2, 3], dtype=np.int64)
    assert order_digest(order) == order_digest(order.astype(">i8"))
    assert order_digest(order) != order_digest(order[::-1].copy())
