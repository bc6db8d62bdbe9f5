"""Leased loading over the coordinator's real ledger, without a network between."""

import contextlib
import logging
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from psserver.core.push import DataRange as CoreRange
from pswire.reasons import Refusal
from psworker.data import (
    CountedLoader,
    LeasedLoader,
    prepare_loader,
)
from tests.doubles.ledger_source import LedgerJob, LedgerSource


def _loader(count: int = 20, **options: object) -> DataLoader[Any]:
    options.setdefault("batch_size", 4)
    return DataLoader(TensorDataset(torch.arange(count)), **options)  # type: ignore[arg-type]


def _train(source: LedgerSource, loader: LeasedLoader) -> list[list[int]]:
    """Values in the order they were drawn, one step a batch."""
    seen = []
    for (batch,) in loader:
        seen.append(batch.tolist())
        source.step()
    return seen


@pytest.mark.parametrize("worker_count", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_one_worker_sees_what_the_plain_loader_would(
    worker_count: int, shuffle: bool
) -> None:
    source = LedgerSource(LedgerJob(1), 0)
    loader = LeasedLoader(
        _loader(18, shuffle=shuffle, num_workers=worker_count), source
    )
    seen = _train(source, loader)
    assert [len(batch) for batch in seen] == [4, 4, 4, 4, 2]
    values = [value for batch in seen for value in batch]
    assert sorted(values) == list(range(18))
    assert (values == list(range(18))) is not shuffle


def test_each_epoch_is_another_order_and_can_be_named() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    loader = LeasedLoader(_loader(shuffle=True), source)
    first, second = _train(source, loader), _train(source, loader)
    assert first != second
    loader.set_epoch(1)
    assert _train(source, loader) == []
    loader.set_epoch(7)
    third = _train(source, loader)
    assert third
    assert {request.epoch for request in source.requests} == {0, 1, 7}


def test_a_last_smaller_batch_is_dropped_when_asked() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    loader = LeasedLoader(_loader(18, drop_last=True), source)
    assert len(loader) == 4
    assert [len(batch) for batch in _train(source, loader)] == [4, 4, 4, 4]


def test_a_batch_is_drawn_when_it_is_handed_out_and_not_before() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    batches = iter(LeasedLoader(_loader(20, num_workers=2), source))
    next(batches)
    next(batches)
    drawn = source.step()
    assert drawn.sample_count == 8
    assert [(each.start, each.stop) for each in drawn.ranges] == [(0, 4), (4, 8)]
    batches.close()


def test_data_is_asked_for_again_when_half_of_it_is_used() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    batches = iter(LeasedLoader(_loader(80), source))
    next(batches)
    # Waiting for the first ones asks for four.
    assert [request.batch_count_max for request in source.requests] == [4]
    next(batches)
    assert len(source.requests) == 2
    batches.close()


def test_two_workers_share_an_epoch_and_both_stop_when_it_is_closed() -> None:
    job = LedgerJob(2, in_rounds=True)
    sources = [LedgerSource(job, 0), LedgerSource(job, 1)]
    seen: list[list[list[list[int]]]] = [[], []]

    def work(index: int) -> None:
        loader = LeasedLoader(_loader(44, shuffle=True), sources[index])
        for _ in range(3):
            seen[index].append(_train(sources[index], loader))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for epoch in range(3):
        values = [v for worker in seen for batch in worker[epoch] for v in batch]
        assert sorted(values) == list(range(44))


def test_an_idle_worker_pushes_nothing_for_clocks_that_wait_for_it() -> None:
    job = LedgerJob(2)
    busy, idle = LedgerSource(job, 0), LedgerSource(job, 1)
    held = iter(LeasedLoader(_loader(4), busy))
    next(held)
    finished = threading.Event()

    def run_idle() -> None:
        assert _train(idle, LeasedLoader(_loader(4), idle)) == []
        finished.set()

    thread = threading.Thread(target=run_idle)
    thread.start()
    for count in (1, 2):
        idle.contribution.set_result(None)
        assert idle.pushed_nothing.wait(10)
        idle.pushed_nothing.clear()
        assert idle.empty_push_count == count
    assert not finished.is_set()
    busy.step()
    with pytest.raises(StopIteration):
        next(held)
    thread.join(10)
    assert finished.is_set()


def test_what_a_worker_drew_and_never_pushed_does_not_strand_it() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    loader = LeasedLoader(_loader(12), source)
    for count, _ in enumerate(loader, start=1):
        if count == 2:
            source.step()
    assert count == 3
    # The rest goes with the next push after all.
    assert source.step().sample_count == 4


def test_leaving_an_epoch_early_gives_its_data_to_the_others() -> None:
    job = LedgerJob(2)
    quitter, other = LedgerSource(job, 0), LedgerSource(job, 1)
    loader = LeasedLoader(_loader(40), quitter)
    for _ in loader:
        quitter.step()
        break
    rest = iter(LeasedLoader(_loader(40), other))
    seen = []
    for _ in range(6):
        seen.append(next(rest)[0].tolist())
        other.step()
    following = iter(loader)  # opens epoch 1
    next(following)
    for (batch,) in rest:
        seen.append(batch.tolist())
        other.step()
    assert sorted(v for batch in seen for v in batch) == list(range(4, 40))
    following.close()


def test_a_report_that_failed_is_made_again() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    loader = LeasedLoader(_loader(40), source)
    batches = iter(loader)
    next(batches)
    source.step()
    source.is_broken = True
    with pytest.raises(ConnectionError):
        for _ in batches:
            pass
    report = source.pending.take_report()
    assert (0, 4) in {(r.start, r.stop) for r in report.consumed}


def test_a_samplers_other_order_is_refused_by_the_ledger() -> None:
    job = LedgerJob(2)
    first, second = LedgerSource(job, 0), LedgerSource(job, 1)
    batches = iter(LeasedLoader(_loader(20), first))
    next(batches)
    other = iter(LeasedLoader(_loader(20, sampler=list(range(19, -1, -1))), second))
    with pytest.raises(Refusal, match="another order"):
        next(other)
    batches.close()


def test_other_attributes_are_those_of_the_users_loader() -> None:
    plain = _loader(20)
    loader = LeasedLoader(plain, LedgerSource(LedgerJob(1), 0))
    assert loader.dataset is plain.dataset
    assert loader.batch_size == 4
    assert loader.sampler is plain.sampler
    assert len(loader) == 5
    with pytest.raises(AttributeError):
        _ = loader.nonsense
    with pytest.raises(ValueError, match="at least 0"):
        loader.set_epoch(-1)


def test_an_empty_dataset_is_an_empty_epoch() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    assert _train(source, LeasedLoader(_loader(0), source)) == []


def test_a_loader_that_the_user_split_is_only_counted() -> None:
    dataset = TensorDataset(torch.arange(10))
    plain = DataLoader(
        dataset, batch_size=3, sampler=DistributedSampler(dataset, 2, 0, shuffle=False)
    )
    source = LedgerSource(LedgerJob(1), 0)
    loader = prepare_loader(plain, source)
    assert isinstance(loader, CountedLoader)
    counts = []
    for _ in loader:
        drawn = source.step()
        counts.append(drawn.sample_count)
        assert drawn.ranges == ()
    assert counts == [3, 2]
    assert len(loader) == 2
    loader.set_epoch(3)
    assert isinstance(plain.sampler, DistributedSampler)
    assert plain.sampler.epoch == 3


def test_persistent_workers_last_as_long_as_the_user_wished() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    loader = LeasedLoader(_loader(8, num_workers=1, persistent_workers=True), source)
    with contextlib.closing(iter(loader)) as batches:
        list(batches)
    fetcher = loader._fetcher
    loader.set_epoch(1)
    assert len(_train(source, loader)) == 2
    assert loader._fetcher is fetcher


@pytest.mark.parametrize("process_count", [0, 2])
@pytest.mark.parametrize("is_in_step", [False, True])
def test_an_evicted_worker_goes_on_with_the_epoch_and_repeats_nothing_it_pushed(
    is_in_step: bool, process_count: int
) -> None:
    """Noticed by the loader, or inside a step, which throws its gradient away."""
    source = LedgerSource(LedgerJob(1), 0)
    seen: list[list[int]] = []
    dropped: list[list[int]] = []
    for (batch,) in LeasedLoader(_loader(40, num_workers=process_count), source):
        if len(seen) == 3 and not source.rejoin_count:
            # What was pushed is consumed, as the coordinator hears from the shards.
            source.job.ledger.consume(
                source.key,
                tuple(CoreRange("loader", 0, n, n + 4) for n in (0, 4, 8)),
            )
            source.evict()
            if is_in_step:
                source.rejoin()
            dropped.append(batch.tolist())
            source.pending.take()
            continue
        seen.append(batch.tolist())
        source.step()
    assert source.rejoin_count == 1
    values = [value for batch in seen for value in batch]
    assert sorted(values) == list(range(40))
    assert dropped[0] in seen


def test_the_end_of_an_epoch_is_shared_out_where_data_goes_to_whoever_asks() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    source.sharer_count = 2
    loader = LeasedLoader(_loader(80), source)
    _train(source, loader)
    asked = [request.batch_count_max for request in source.requests]
    assert asked[0] == 4  # of 20 batches
    assert asked[-1] == 1
    assert sorted(asked, reverse=True)[0] == 4


def test_epochs_that_others_have_trained_are_told_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    job = LedgerJob(2)
    first, late = LedgerSource(job, 0), LedgerSource(job, 1)
    loader = LeasedLoader(_loader(), first)
    for _ in range(3):
        _train(first, loader)
    joined = LeasedLoader(_loader(), late)
    for _ in range(3):
        assert _train(late, joined) == []
    assert not caplog.messages
    for _ in range(2):
        assert _train(late, joined)
    joined.tell_missed()
    assert caplog.messages == [
        "epochs 0 to 2 of 'loader' are trained already: this worker goes on with "
        "epoch 3"
    ]
    assert caplog.records[0].levelno == logging.INFO


def test_a_worker_that_never_got_a_batch_is_warned_once_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = LedgerJob(2)
    first, late = LedgerSource(job, 0), LedgerSource(job, 1)
    loader = LeasedLoader(_loader(), first)
    for epoch in (0, 1, 4):
        loader.set_epoch(epoch)
        _train(first, loader)
    joined = LeasedLoader(_loader(), late)
    for epoch in (0, 1, 4):
        joined.set_epoch(epoch)
        assert _train(late, joined) == []
    assert not caplog.messages
    joined.tell_missed()
    joined.tell_missed()
    (message,) = caplog.messages
    assert "got no batch of epochs 0 to 1, 4 of 'loader'" in message
    assert "trained all of them; for a new run" in message
