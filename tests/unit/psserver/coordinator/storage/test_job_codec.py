"""What is written is what is read."""

import json
from collections import deque

import pytest

from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.data.position_set import PositionSet
from psserver.coordinator.storage.job_codec import (
    dump_enrolments,
    dump_epoch,
    dump_processes,
    dump_record,
    load_enrolments,
    load_epoch,
    load_processes,
    load_record,
)
from pswire.leased_data import DataRange, EpochShape
from pswire.membership import (
    ClockChoice,
    FenceKind,
    Member,
    MixedClock,
    Mode,
    Record,
)
from tests.doubles.core_values import departure, key, member, record

WHOLE_RECORD = Record(
    fence_number=2_000_000_007,
    generation=9,
    kind=FenceKind.MEMBERSHIP,
    members=(
        Member(worker=key("a/3"), rank=1, base_clock=4, base_sequence=9),
        member('quote"\u2028', 0, 0),
    ),
    departures=(
        departure("b", base_clock=1, last_clock=5, evicted=True),
        departure("c", last_clock=5),
    ),
    departed_step_count=11,
    skipped_clocks=(5, 6),
    mixed_clocks=(MixedClock(6, publishes=True),),
    mode=Mode.SSP,
    staleness_bound=3,
    mode_clock=4,
    workers_floor=2,
    commit=ClockChoice(6, (key("a/3"), key("b")), 0.1 + 0.2, 1 / 3),
    finished_step_count=77,
)


@pytest.mark.parametrize("what", [WHOLE_RECORD, record({"a": 0}), record({})])
def test_a_record_survives(what: Record) -> None:
    loaded = load_record(dump_record(what))

    assert loaded == what
    assert isinstance(loaded.kind, FenceKind)
    assert isinstance(loaded.mode, Mode)
    assert loaded.member_of(key("a/3")) == what.member_of(key("a/3"))


def test_an_epoch_survives() -> None:
    ledger = EpochLedger(
        "loader",
        3,
        EpochShape(position_count=100, batch_size=8, drop_last=True),
        origin=bytes(range(256)),
        order_digest=(1 << 64) - 1,
        registrant=key("a"),
        cursor=40,
        returned=deque([DataRange("loader", 3, 0, 8)]),
        queues={key("a"): deque([DataRange("loader", 3, 8, 16)]), key("b/2"): deque()},
        held={key("b/2"): {DataRange("loader", 3, s, s + 8) for s in (16, 24)}},
        consumed_count=8,
        torn_count=16,
        dropped_count=24,
        skipped={
            key("a"): PositionSet([(32, 40), (72, 80)]),
            key("b/2"): PositionSet(),
        },
        settled_skipped_count=4,
        revoked={key("b/2"): {DataRange("loader", 3, 0, 8)}},
        repeated_count=2,
        taken_back={8: 1, 24: 3},
        repetition_max=3,
    )

    loaded = load_epoch("loader", 3, dump_epoch(ledger))

    assert loaded == ledger
    participants = (key("a"), key("b/2"))
    assert loaded.lease(key("a"), participants, 9) == ledger.lease(
        key("a"), participants, 9
    )


def test_an_epoch_of_a_release_that_did_not_count_skips_can_be_read() -> None:
    shape = EpochShape(position_count=9, batch_size=1, drop_last=False)
    ledger = EpochLedger("loader", 0, shape, consumed_count=3)
    written = json.loads(dump_epoch(ledger))
    for name in (
        "origin",
        "skipped",
        "settled_skipped_count",
        "revoked",
        "repeated_count",
    ):
        del written[name]
    assert load_epoch("loader", 0, json.dumps(written)) == ledger


def test_a_new_epoch_survives() -> None:
    shape = EpochShape(position_count=1, batch_size=1, drop_last=False)
    ledger = EpochLedger("loader", 0, shape)
    assert load_epoch("loader", 0, dump_epoch(ledger)) == ledger


def test_the_same_state_is_written_the_same() -> None:
    """Sets have no order; the file has one, so that two files can be compared."""
    shape = EpochShape(position_count=90, batch_size=1, drop_last=False)
    texts = set()
    for order in (range(40), reversed(range(40))):
        held = {DataRange("loader", 0, start, start + 1) for start in order}
        texts.add(dump_epoch(EpochLedger("loader", 0, shape, held={key("a"): held})))
    assert len(texts) == 1


def test_a_person_can_read_it() -> None:
    found = json.loads(dump_record(WHOLE_RECORD))
    assert found["generation"] == 9
    assert found["members"][0]["worker"] == ["a", 3]


def test_processes_and_enrolments_survive() -> None:
    processes = {key("a/1"): "p", key("a/2"): "q", key('"/3'): ""}
    assert load_processes(dump_processes(processes)) == processes
    enrolments = (("loader", (key("a"), key("b/2"))), ("généré", ()))
    assert load_enrolments(dump_enrolments(enrolments)) == enrolments
