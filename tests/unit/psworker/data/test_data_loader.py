"""Leased loading over the coordinator's real ledger, without a network between."""

import contextlib
import logging
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from typing_extensions import override

from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from pswire.leased_data import DataRange, DataReport, EpochShape
from pswire.limits import HELD_COUNT_MAX
from pswire.reasons import Refusal
from psworker.data import CountedLoader, LeasedLoader, prepare_loader
from psworker.data.leases import ROUND_BATCH_COUNT_AHEAD_MAX
from psworker.data.local_loader import LocalDraws, LocalLoader
from psworker.data.missed_epochs import MissedEpochs
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


class _InRounds(LedgerSource):
    """Pushes when its loader says so, and never before.

    Attributes:
        held: What was trained and not pushed.
        pushed_counts: Batches of each push.
    """

    def __init__(self, job: LedgerJob) -> None:
        super().__init__(job, 0)
        self.held: list[DataRange] = []
        self.pushed_counts: list[int] = []

    @override
    def end_round(self) -> None:
        if self.held:
            self.pushed_counts.append(len(self.held))
            self.pending.unreported.note(self.held, is_dropped=False)
            self.held = []


def test_a_round_ends_at_the_most_batches_that_a_worker_may_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = _InRounds(LedgerJob(1))
    count = HELD_COUNT_MAX + 10
    loader = LeasedLoader(_loader(count, batch_size=1, shuffle=True), source)
    seen = []
    with caplog.at_level(logging.WARNING):
        for (batch,) in loader:
            seen.append(batch.item())
            source.held += source.pending.take().ranges
    assert sorted(seen) == list(range(count))
    assert source.pushed_counts == [HELD_COUNT_MAX, 10]
    assert loader.report is not None
    assert loader.report.seen_once == count
    (line,) = (each.getMessage() for each in caplog.records)
    assert line.startswith("this worker has 4096 batches of epoch 0 of 'loader' that")
    assert line.endswith("larger batches, or rounds of fewer local steps")


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


def test_half_of_a_round_of_local_steps_is_leased_ahead() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    source.work.round_step_count = 20
    batches = iter(LeasedLoader(_loader(400), source))
    for count in (1, 1, 1, 1, 2):  # requests by then: again when half is used
        next(batches)
        assert len(source.requests) == count
    assert [request.batch_count_max for request in source.requests] == [10, 5]
    batches.close()
    long = LedgerSource(LedgerJob(1), 0)
    long.work.round_step_count = 1_000_000
    next(iter(LeasedLoader(_loader(4000), long)))
    assert long.requests[0].batch_count_max == ROUND_BATCH_COUNT_AHEAD_MAX


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


def test_a_wait_for_data_is_said_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psworker.data.leases.WAITING_INTERVAL_MS", 10)
    job = LedgerJob(2)
    busy, idle = LedgerSource(job, 0), LedgerSource(job, 1)
    held = iter(LeasedLoader(_loader(4), busy))
    next(held)

    def end_at_the_fourth_line() -> str:
        if len(waits_said(caplog)) == 3:
            busy.step()
            assert next(held, None) is None
        return "w0"

    monkeypatch.setattr(idle, "holders", end_at_the_fourth_line)
    with caplog.at_level(logging.WARNING, "psworker"):
        assert _train(idle, LeasedLoader(_loader(4), idle)) == []
    waited_s = waits_said(caplog)
    assert len(waited_s) == 4
    # Each time after twice as long; what the clocks of a wait lack is no hundredth.
    assert all(later > 1.99 * earlier for earlier, later in pairwise(waited_s))


def waits_said(caplog: pytest.LogCaptureFixture) -> list[float]:
    """Seconds, in the order of the lines."""
    said = [each for each in caplog.records if each.msg.startswith("waiting for data")]
    return [each.args[0] for each in said if isinstance(each.args, tuple)]  # type: ignore[misc]


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
    report = source.pending.unreported.take()
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
            used = tuple(DataRange("loader", 0, n, n + 4) for n in (0, 4, 8))
            source.job.ledger.take_report(source.key, DataReport(used))
            source.evict()
            if is_in_step:
                source.rejoin(0)
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


def test_more_workers_than_batches_are_told_so_in_the_first_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = LedgerJob(3)
    sources = [LedgerSource(job, index) for index in range(3)]
    loaders = [LeasedLoader(_loader(8), source) for source in sources]
    _train(sources[0], loaders[0])
    for _ in range(2):
        assert _train(sources[2], loaders[2]) == []
        _train(sources[0], loaders[0])
    loaders[2].tell_missed()
    assert caplog.messages == [
        "this worker got no batch of epoch 0 of 'loader': it has 2 for 3 workers; make "
        "its batches smaller, or train with at most 2 workers"
    ]


def test_a_worker_whose_epochs_ended_without_it_is_not_sent_to_a_new_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    missed = MissedEpochs("loader")
    missed.add(0, batch_count=6, worker_count=2, was_over=False)
    missed.add(1, batch_count=6, worker_count=2, was_over=True)
    missed.end()
    (message,) = caplog.messages
    assert "had drawn all of them before it asked" in message
    assert "new run" not in message


# The order, the random numbers and the length of one process


class Augmented(Dataset[float]):
    """Takes a random number for each sample, in whatever process."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(()))


def _epochs(loader: Any, source: LedgerSource | None) -> tuple[list[Any], float]:  # noqa: ANN401
    torch.manual_seed(11)
    seen = []
    for _ in range(3):
        for batch in loader:
            seen.append(batch.tolist())
            torch.rand(())  # as dropout would
            if source is not None:
                source.step()
    return seen, float(torch.rand(()))


@pytest.mark.parametrize("with_generator", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["alone", "processes", "persistent"],
)
def test_one_worker_has_the_batches_and_random_numbers_of_a_plain_loader(
    options: dict[str, Any], with_generator: bool
) -> None:
    def make() -> DataLoader[Any]:
        own = torch.Generator().manual_seed(4) if with_generator else None
        return DataLoader(Augmented(), 4, shuffle=True, generator=own, **options)

    expected = _epochs(make(), None)
    source = LedgerSource(LedgerJob(1), 0)
    assert _epochs(LeasedLoader(make(), source), source) == expected


def test_workers_have_together_the_order_of_the_one_that_opens_an_epoch() -> None:
    job = LedgerJob(2, in_rounds=True)
    first, second = LedgerSource(job, 0), LedgerSource(job, 1)
    torch.manual_seed(1)
    plain = [batch.tolist() for (batch,) in _loader(40, shuffle=True)]
    torch.manual_seed(1)
    leading = iter(LeasedLoader(_loader(40, shuffle=True), first))
    seen = [next(leading)[0].tolist()]
    torch.manual_seed(2)
    list(_loader(40, shuffle=True))
    own = torch.rand(())
    torch.manual_seed(2)
    following = iter(LeasedLoader(_loader(40, shuffle=True), second))
    seen.append(next(following)[0].tolist())
    # What it takes of its own random numbers is a plain loader's.
    assert torch.equal(torch.rand(()), own)
    for _ in range(4):
        first.step()
        seen.append(next(leading)[0].tolist())
        second.step()
        seen.append(next(following)[0].tolist())
    assert seen == plain
    leading.close()
    following.close()


def test_a_worker_that_comes_when_an_epoch_is_over_needs_no_order_of_it() -> None:
    job = LedgerJob(2)
    first, late = LedgerSource(job, 0), LedgerSource(job, 1)
    loader = LeasedLoader(_loader(shuffle=True), first)
    for _ in range(2):
        _train(first, loader)
    assert _train(late, LeasedLoader(_loader(shuffle=True), late)) == []
    assert job.ledger.epochs()[0].origin == b""


def test_an_evicted_worker_takes_random_numbers_once_for_an_epoch() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    plain = _loader(40, shuffle=True)
    torch.manual_seed(1)
    list(plain)
    expected = torch.rand(())
    torch.manual_seed(1)
    for number, _ in enumerate(LeasedLoader(plain, source)):
        if number == 3:
            source.evict()
        else:
            source.step()
    assert source.rejoin_count == 1
    assert torch.equal(torch.rand(()), expected)


def test_epochs_before_are_looked_through_once_after_a_rejoin() -> None:
    """Not again with every later epoch."""
    source = LedgerSource(LedgerJob(1), 0)
    loader = LeasedLoader(_loader(40), source)
    for epoch in range(4):
        for number, _ in enumerate(loader):
            if (epoch, number) == (1, 3):
                source.evict()
            else:
                source.step()
    assert source.entered_again == [1]


def test_with_a_seed_of_the_job_orders_hang_on_no_workers_own() -> None:
    seen = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        source = LedgerSource(LedgerJob(1, job_seed=3), 0)
        seen.append(_train(source, LeasedLoader(_loader(shuffle=True), source)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("batch_count", [0, 1, 3, 5, 6])
def test_in_rounds_the_length_is_what_a_worker_gets(batch_count: int) -> None:
    job = LedgerJob(3, in_rounds=True)
    sources = [LedgerSource(job, index) for index in range(3)]
    loaders = [LeasedLoader(_loader(4 * batch_count), source) for source in sources]
    dealt = EpochLedger(
        "loader",
        0,
        shape=EpochShape(position_count=4 * batch_count, batch_size=4, drop_last=False),
    )
    got = [len(dealt.lease(key, tuple(job.keys), 99)) for key in reversed(job.keys)]
    assert [len(loader) for loader in reversed(loaders)] == got


# What a script sets


def test_what_is_set_on_a_prepared_loader_counts_from_the_next_epoch_on() -> None:
    source = LedgerSource(LedgerJob(1), 0)
    plain = _loader(8)
    loader = LeasedLoader(plain, source)
    batches = iter(loader)
    next(batches)
    loader.collate_fn = lambda batch: (torch.stack([each[0] for each in batch]) * 10,)
    source.step()
    assert next(batches)[0].tolist() == [4, 5, 6, 7]
    source.step()
    assert _train(source, loader) == [[0, 10, 20, 30], [40, 50, 60, 70]]
    loader.generator = own = torch.Generator().manual_seed(1)
    _train(source, loader)
    assert not torch.equal(own.get_state(), own.manual_seed(1).get_state())
    loader.stage = "late"
    assert plain.stage == loader.stage == "late"  # type: ignore[attr-defined]
    del loader.stage
    assert not hasattr(plain, "stage")


@pytest.mark.parametrize("kind", ["leased", "counted", "local"])
def test_what_torch_does_not_let_be_set_is_refused_as_it_does(kind: str) -> None:
    plain = _loader(8)
    source = LedgerSource(LedgerJob(1), 0)
    made: Any = LeasedLoader(plain, source)
    if kind != "leased":
        made = (
            CountedLoader(plain, source)
            if kind == "counted"
            else LocalLoader(plain, LocalDraws())
        )
    for name in ("batch_size", "sampler", "batch_sampler", "dataset", "drop_last"):
        with pytest.raises(ValueError, match=f"{name} attribute should not be set"):
            setattr(made, name, getattr(plain, name))
    with pytest.raises(AttributeError, match="report"):
        made.report = 1


@pytest.mark.parametrize("kind", ["counted", "local"])
@pytest.mark.parametrize("through", ["prepared", "own"])
def test_loaders_that_lease_nothing_follow_what_is_set_too(
    kind: str, through: str
) -> None:
    plain = _loader(8, num_workers=1)
    made: Any = (
        CountedLoader(plain, LedgerSource(LedgerJob(1), 0))
        if kind == "counted"
        else LocalLoader(plain, LocalDraws())
    )
    assert [batch.tolist() for (batch,) in made] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    target = made if through == "prepared" else plain
    target.num_workers = 0
    target.prefetch_factor = None
    target.collate_fn = lambda batch: (torch.stack([each[0] for each in batch]) * 10,)
    assert [batch[1].item() for (batch,) in made] == [10, 50]


@pytest.mark.parametrize("kind", ["counted", "local"])
def test_persistent_processes_go_on_where_nothing_is_leased(kind: str) -> None:
    plain = _loader(8, num_workers=1, persistent_workers=True)
    made: Any = (
        CountedLoader(plain, LedgerSource(LedgerJob(1), 0))
        if kind == "counted"
        else LocalLoader(plain, LocalDraws())
    )
    list(made)
    copied = made._counting if kind == "counted" else made._fetcher
    processes = copied._iterator
    assert len(list(made)) == 2
    copied = made._counting if kind == "counted" else made._fetcher
    assert copied._iterator is processes is not None


def test_a_data_set_grows_between_epochs() -> None:
    data = list(range(6))
    source = LedgerSource(LedgerJob(1), 0)
    loader = LeasedLoader(DataLoader(data, batch_size=4, shuffle=True), source)  # type: ignore[arg-type]
    for count in (6, 10, 3):
        data[:] = range(count)
        seen = []
        for batch in loader:
            seen += batch.tolist()
            source.step()
        assert sorted(seen) == list(range(count))
    assert len(loader) == 1


def test_a_data_set_that_has_grown_on_one_worker_alone_is_refused() -> None:
    job = LedgerJob(2)
    first, second = LedgerSource(job, 0), LedgerSource(job, 1)
    batches = iter(LeasedLoader(_loader(20), first))
    next(batches)
    with pytest.raises(Refusal, match="must have done so on all workers"):
        next(iter(LeasedLoader(_loader(24), second)))
    batches.close()


# A split of the user's


@pytest.mark.parametrize(
    ("split", "worker", "cause"),
    [
        ((2, 1), (2, 1), None),
        ((1, 0), (2, 1), "for 1 worker, and this job has 2"),
        ((4, 1), (2, 1), "for 4 workers, and this job has 2"),
        ((2, 0), (2, 1), "draws the part of rank 0, and this worker has rank 1 of 2"),
    ],
)
def test_a_split_for_other_workers_is_warned_of_once(
    split: tuple[int, int],
    worker: tuple[int, int],
    cause: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    dataset = TensorDataset(torch.arange(8))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, *split)
    source = LedgerSource(LedgerJob(worker[0]), worker[1])
    loader = prepare_loader(DataLoader(dataset, sampler=sampler), source)
    for _ in range(2):
        list(loader)
    assert len(caplog.messages) == (cause is not None)
    assert cause is None or cause in caplog.messages[0]
    # A launcher that numbers its processes otherwise has given each its own.
    caplog.clear()
    monkeypatch.setenv("RANK", str(split[1]))
    list(prepare_loader(DataLoader(dataset, sampler=sampler), source))
    assert len(caplog.messages) == (split[0] != worker[0])
