"""What a script may do with a prepared loader: peek, break, fail, draw from two."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from pswire.leased_data import DataReport, EpochShape
from psworker.data import CountedLoader, LeasedLoader, prepare_loader
from psworker.data.batch_tensors import CallArguments
from psworker.data.leases import EpochLeases
from psworker.data.order import order_digest
from psworker.errors import ConfigurationError
from psworker.transport.values import EpochRequest
from tests.doubles.ledger_source import LedgerJob, LedgerSource


def _loader(count: int = 20, **options: object) -> DataLoader[Any]:
    options.setdefault("batch_size", 4)
    return DataLoader(TensorDataset(torch.arange(count)), **options)  # type: ignore[arg-type]


@pytest.fixture
def source() -> LedgerSource:
    return LedgerSource(LedgerJob(1), 0)


def _train(source: LedgerSource, loader: Any) -> list[Any]:  # noqa: ANN401, any of ours
    seen = []
    for batch in loader:
        seen.append(batch)
        source.step()
    return seen


# The report


def test_an_epoch_ends_with_a_report_of_its_samples(source: LedgerSource) -> None:
    loader = LeasedLoader(_loader(18, drop_last=True), source)
    assert loader.report is None
    _train(source, loader)
    report = loader.report
    assert report is not None
    assert report.is_complete
    assert (report.epoch, report.count, report.seen_once, report.left_out) == (
        *(0, 18, 16),
        2,
    )


def test_a_loader_that_no_step_follows_is_told_of(
    source: LedgerSource, caplog: pytest.LogCaptureFixture
) -> None:
    loader = LeasedLoader(_loader(20), source)
    for _ in loader:
        pass
    (warning,) = caplog.messages
    assert warning.startswith("no step was behind any batch of loader in epoch 0")
    assert warning.endswith("iterate loaders for evaluation without prepare()")


def test_a_batch_behind_no_step_is_reported_as_skipped(source: LedgerSource) -> None:
    loader = LeasedLoader(_loader(20), source)
    for number, _ in enumerate(loader):
        if number != 4:
            source.step()
    report = loader.report
    assert report is not None
    assert (report.seen_once, report.skipped, report.never) == (16, 4, 0)
    assert not report.is_complete
    # The rest of an accumulation: the next epoch's first step pushes it after all.
    batches = iter(loader)
    next(batches)
    assert source.step().sample_count == 8
    batches.close()
    for _ in loader:
        break
    assert source.job.ledger.epochs()[0].report.seen_once == 20


# Peeking and leaving early


def test_a_batch_that_was_only_peeked_at_does_not_weigh(source: LedgerSource) -> None:
    loader = LeasedLoader(_loader(20), source)
    next(iter(loader))
    for _ in loader:
        assert source.step().sample_count == 4
    first, second = source.job.ledger.epochs()
    assert first.report.skipped == 4
    assert second.report.is_complete


def test_the_batch_at_which_a_script_breaks_does_not_weigh(
    source: LedgerSource,
) -> None:
    loader = LeasedLoader(_loader(20), source)
    for number, _ in enumerate(loader):
        if number == 2:
            break
        source.step()
    for _ in loader:
        assert source.step().sample_count == 4
    report = source.job.ledger.epochs()[0].report
    assert (report.seen_once, report.skipped) == (8, 4)
    assert report.never == 8


def test_a_batch_that_has_left_a_gradient_weighs_whatever_the_script_does(
    source: LedgerSource,
) -> None:
    loader = LeasedLoader(_loader(20), source)
    for _ in loader:
        source.has_gradient = True
        break
    for _ in loader:
        assert source.step().sample_count == 8
        break
    assert source.job.ledger.epochs()[0].report.skipped == 4
    _train(source, loader)
    # Told with the next report: the push has made them seen.
    assert source.job.ledger.epochs()[0].report.seen_once == 4


# Two at a time


def test_of_two_iterations_the_older_one_is_refused(source: LedgerSource) -> None:
    loader = LeasedLoader(_loader(20), source)
    older, newer = iter(loader), iter(loader)
    with pytest.raises(ConfigurationError, match=r"epoch 0.*prepare a second loader"):
        next(older)
    assert len(_train(source, newer)) == 5
    begun = iter(loader)
    next(begun)
    source.step()
    assert len(_train(source, loader)) == 5
    with pytest.raises(ConfigurationError, match="a newer one has begun"):
        next(begun)


# Ahead of the steps


class Ahead:
    """A script with one batch in hand while it draws the next."""

    def __init__(self, source: LedgerSource) -> None:
        self.source = source
        self.seen: list[list[int]] = []
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        source.pending.watch(lambda: False, parameters=[weight], optimizer_count=1)

    def train(self, batch: list[torch.Tensor]) -> None:
        pending = self.source.pending
        pending.note_backward(pending.note_call(CallArguments(batch)))
        assert self.source.step().sample_count == len(batch[0])
        self.seen.append(batch[0].tolist())

    def draw_epoch(self, loader: LeasedLoader) -> list[torch.Tensor]:
        """Trains on all batches of an epoch but the last."""
        iteration = iter(loader)
        in_hand: list[torch.Tensor] = next(iteration)
        for batch in iteration:
            self.train(in_hand)
            in_hand = batch
        return in_hand


@pytest.fixture
def in_rounds() -> tuple[LedgerSource, LedgerSource]:
    job = LedgerJob(2, in_rounds=True)
    return LedgerSource(job, 0), LedgerSource(job, 1)


def _others_part(source: LedgerSource, *, is_done: bool) -> None:
    """Another worker draws its part of the epoch, and trains on it or is lost."""
    shape = EpochShape(position_count=16, batch_size=4, drop_last=False)
    source.open_epoch(
        EpochRequest(
            loader="loader", epoch=0, shape=shape, origin=b"", report=DataReport()
        )
    )
    leases = EpochLeases(
        source,
        loader="loader",
        epoch=0,
        shape=shape,
        order_digest=order_digest(np.arange(16)),
    )
    while (data_range := leases.take()) is not None:
        source.pending.draw(4, data_range)
        if is_done:
            source.step()
    if not is_done:
        source.evict()
        return
    source.job.take_report(source.key, source.pending.unreported.take())
    source.job.retry()


def test_with_batches_in_hand_an_iteration_ends_before_its_epoch(
    in_rounds: tuple[LedgerSource, LedgerSource],
) -> None:
    """Nobody pushes nothing in place of a step that comes, and the report is whole."""
    source, other = in_rounds
    script = Ahead(source)
    loader = LeasedLoader(_loader(16), source)
    _others_part(other, is_done=True)

    in_hand = script.draw_epoch(loader)
    assert not any(request.wait for request in source.requests)
    assert loader.report is None  # it does not wait for a step that comes later
    script.train(in_hand)
    assert loader.report is not None
    assert (loader.report.seen_once, loader.report.skipped) == (16, 0)
    assert source.empty_push_count == 0
    assert len(list(loader)) == 4 - 2
    assert script.seen == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_what_a_lost_worker_gives_back_comes_before_the_next_epoch(
    in_rounds: tuple[LedgerSource, LedgerSource],
) -> None:
    source, other = in_rounds
    script = Ahead(source)
    loader = LeasedLoader(_loader(16), source)
    script.train(script.draw_epoch(loader))
    _others_part(other, is_done=False)
    source.job.keys.pop()

    for batch in loader:
        script.train(batch)

    first = source.job.ledger.epochs()[0].report
    assert first.seen_once == 16
    assert sorted(script.seen[2:4]) == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert len(script.seen) == 2 + 2 + 4


def test_a_thread_that_draws_completes_no_step_of_another_one(
    source: LedgerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write values while the other one computes with them."""
    settled: list[bool] = []
    monkeypatch.setattr(
        source, "settle", lambda: settled.append(source.pending.has_ahead("loader"))
    )
    script = Ahead(source)
    loader = LeasedLoader(_loader(8), source)
    with ThreadPoolExecutor(1) as threads:
        for epoch_count in (1, 2):
            drawn = threads.submit(lambda: list(loader)).result(20)
            assert len(drawn) == 2
            for batch in drawn:
                script.train(batch)
            assert len(source.job.ledger.epochs()) == epoch_count
    assert settled
    assert not any(settled)


def test_what_is_in_hand_over_the_end_of_an_epoch_is_trained_in_the_next(
    source: LedgerSource,
) -> None:
    script = Ahead(source)
    loader = LeasedLoader(_loader(8), source)
    in_hand = script.draw_epoch(loader)
    iteration = iter(loader)
    following = next(iteration)
    script.train(in_hand)
    script.train(following)
    assert [len(each) for each in script.seen] == [4, 4, 4]
    assert source.empty_push_count == 0
    for batch in iteration:
        script.train(batch)
    assert source.job.ledger.epochs()[0].report.seen_once == 8


# Errors


class Faulty(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise OSError("the disk is gone")
        return index


@pytest.mark.parametrize("process_count", [0, 1])
def test_an_error_of_the_dataset_is_the_users_own(
    source: LedgerSource, process_count: int
) -> None:
    options: dict[str, Any] = {"persistent_workers": process_count > 0}
    plain = DataLoader(Faulty(), batch_size=4, num_workers=process_count, **options)
    loader = LeasedLoader(plain, source)
    batches = iter(loader)
    next(batches)
    source.step()
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    # Not the end of the data, which a StopIteration would say.
    with pytest.raises(ConfigurationError, match="ended by OSError; begin a new one"):
        next(batches)
    # Also persistent worker processes begin anew.
    again = iter(loader)
    assert next(again).tolist() == [0, 1, 2, 3]
    again.close()


class Interrupting(Faulty):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyboardInterrupt
        return index


def test_ctrl_c_passes_through(source: LedgerSource) -> None:
    loader = LeasedLoader(DataLoader(Interrupting(), batch_size=4), source)
    with pytest.raises(KeyboardInterrupt):
        _train(source, loader)
    report = source.job.ledger.epochs()[0].report
    assert (report.seen_once, report.never) == (4, 8)


# Options of torch


def test_the_users_options_are_those_of_the_fetching_loader(
    source: LedgerSource,
) -> None:
    def begin(index: int) -> None: ...

    plain = _loader(
        8,
        num_workers=1,
        timeout=7,
        prefetch_factor=3,
        worker_init_fn=begin,
        in_order=False,
        multiprocessing_context="fork",
    )
    loader = LeasedLoader(plain, source)
    with contextlib.closing(iter(loader)) as batches:
        next(batches)
        made = loader._fetcher
        assert made is not None
        assert (made.timeout, made.prefetch_factor) == (7, 3)
        assert made.worker_init_fn is begin
        assert made.multiprocessing_context is plain.multiprocessing_context
        assert made.in_order  # each batch must meet its own range
        assert made.collate_fn is plain.collate_fn
    assert plain.batch_sampler is not loader._feed
    assert [batch[0].tolist() for batch in plain] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_pin_memory_without_a_gpu_warns_as_torch_does(source: LedgerSource) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator to pin memory for")
    loader = LeasedLoader(_loader(8, pin_memory=True), source)
    with pytest.warns(UserWarning, match="pin_memory"):
        assert len(_train(source, loader)) == 2


def test_an_epoch_takes_as_many_random_numbers_as_a_plain_one(
    source: LedgerSource,
) -> None:
    plain = _loader(8)
    torch.manual_seed(3)
    list(plain)
    expected = torch.rand(())
    torch.manual_seed(3)
    _train(source, LeasedLoader(plain, source))
    assert torch.equal(torch.rand(()), expected)


# Shapes of data


def test_batches_that_differ_in_size_weigh_what_they_hold(
    source: LedgerSource,
) -> None:
    batches = [[0], [1, 2, 3], [4, 5], [6]]
    plain = DataLoader(TensorDataset(torch.arange(7)), batch_sampler=batches)
    loader = LeasedLoader(plain, source)
    counts = []
    for (batch,) in loader:
        drawn = source.step()
        assert drawn.sample_count == len(batch)
        counts.append(len(batch))
    assert counts == [1, 3, 2, 1]
    report = loader.report
    assert report is not None
    assert (report.unit, report.count, report.seen_once) == ("batches", 4, 4)


def test_without_batches_each_item_comes_as_the_dataset_gives_it(
    source: LedgerSource,
) -> None:
    plain = _loader(3, batch_size=None)
    items = _train(source, LeasedLoader(plain, source))
    assert [item.tolist() for (item,) in items] == [0, 1, 2]
    lists = BatchSampler(RandomSampler(range(6)), 4, drop_last=False)
    loader = LeasedLoader(
        DataLoader(TensorDataset(torch.arange(6)), batch_size=None, sampler=lists),
        LedgerSource(LedgerJob(1), 0),
    )
    sizes = [len(batch) for (batch,) in loader]
    assert sizes == [4, 2]


def test_a_dataset_of_one_sample_and_more_workers_than_batches() -> None:
    job = LedgerJob(3)
    sources = [LedgerSource(job, index) for index in range(3)]
    loaders = [LeasedLoader(_loader(1), source) for source in sources]
    assert [len(loader) for loader in loaders] == [1, 1, 1]
    seen = [len(_train(s, each)) for s, each in zip(sources, loaders, strict=True)]
    assert seen == [1, 0, 0]


def test_a_loaders_length_is_the_part_that_a_worker_may_expect() -> None:
    loader = LeasedLoader(_loader(44), LedgerSource(LedgerJob(3), 0))
    assert len(loader) == 4
    assert loader.batch_count == 11
    assert loader.dataset.tensors[0].shape == (44,)


# Data that the user splits


class Stream(IterableDataset[int]):
    epoch = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + self.count))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("process_count", [0, 2])
def test_a_stream_is_counted_batch_by_batch_and_warned_of_once(
    source: LedgerSource, caplog: pytest.LogCaptureFixture, process_count: int
) -> None:
    plain = DataLoader(Stream(7), batch_size=3, num_workers=process_count)
    loader = prepare_loader(plain, source)
    assert isinstance(loader, CountedLoader)
    for _ in range(2):
        counts = []
        for batch in loader:
            drawn = source.step()
            assert drawn.ranges == ()
            assert drawn.sample_count == len(batch)
            counts.append(len(batch))
        # Each worker process reads the whole stream, as torch's own loader has it.
        assert sorted(counts) == sorted([3, 3, 1] * max(1, process_count))
    (message,) = caplog.messages
    assert "no positions to lease" in message
    assert "ps.rank of ps.worker_count" in message


def test_a_stream_hears_of_the_epoch(source: LedgerSource) -> None:
    loader = prepare_loader(DataLoader(Stream(2), batch_size=2), source)
    loader.set_epoch(5)
    (batch,) = loader
    assert batch.tolist() == [5, 6]


def test_a_stream_without_batches_counts_items(source: LedgerSource) -> None:
    loader = prepare_loader(DataLoader(Stream(2), batch_size=None), source)
    for _ in loader:
        assert source.step().sample_count == 1


def test_a_batch_of_a_stream_at_which_a_script_breaks_does_not_weigh(
    source: LedgerSource,
) -> None:
    loader = prepare_loader(DataLoader(Stream(8), batch_size=4), source)
    next(iter(loader))
    for _ in loader:
        assert source.step().sample_count == 4


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_fixed_split_is_counted_and_warned_of_when_workers_come_or_go(
    caplog: pytest.LogCaptureFixture, is_wrapped: bool
) -> None:
    dataset = TensorDataset(torch.arange(10))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, 2, 1, shuffle=False)
    options: dict[str, Any] = {"batch_size": 3, "sampler": sampler}
    if is_wrapped:
        options = {"batch_sampler": BatchSampler(sampler, 3, drop_last=False)}
    source = LedgerSource(LedgerJob(2), 1)
    loader = prepare_loader(DataLoader(dataset, **options), source)
    for _ in range(2):
        assert [source.step().sample_count for _ in loader] == [3, 2]
    loader.set_epoch(4)
    assert sampler.epoch == 4
    assert not caplog.messages
    source.worker_count = 3
    list(loader)
    (message,) = caplog.messages
    assert "has 3 workers now and had 2" in message
    assert "split by a DistributedSampler" in message
    assert "use shuffle=True" in message


class Unpacking(DataLoader[Any]):
    def __iter__(self) -> Any:  # noqa: ANN401
        return super().__iter__()


def test_a_loader_with_an_iteration_of_its_own_is_refused(source: LedgerSource) -> None:
    with pytest.raises(TypeError, match="Unpacking has an __iter__ of its own"):
        prepare_loader(Unpacking(Stream(2)), source)
