"""What shards and the coordinator write down."""

import json
from pathlib import Path
from typing import Any

from psserver.coordinator.core.coordinator_effects import Abort, DecideCut, Prepare
from psserver.coordinator.host.history import CoordinatorHistory
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.fence_report import FenceReport, WorkerHolding
from psserver.edge.record_history import record_values
from psserver.shard.core.effects import ApplyChunk, StagedContribution
from psserver.shard.core.push import PushId, Reply
from psserver.shard.core.shard import ShardCore
from psserver.shard.core.shard_fence import Cut
from psserver.shard.host.history import ShardHistory, pushes_of
from pswire.membership import FenceKind, Mode, Outcome
from tests.doubles.core_values import departure, key, record, trailer

SETTINGS = CoordinatorSettings(job_id="job", shard_count=2)
PUSH = PushId(key("a"), 3)
REPLY = Reply(
    outcome=Outcome.APPLIED,
    generation=1,
    version=6,
    frontier=2,
    clock=3,
    mode=Mode.SSP,
    staleness_bound=1,
)


def opened(folder: Path) -> ShardHistory:
    return ShardHistory.open(
        str(folder), shard_index=1, incarnation=4, settings=SETTINGS
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def update(*names: str, pusher: str = "", clock: int = 5) -> ApplyChunk:
    return ApplyChunk(
        clock=clock,
        chunk_index=2,
        optimizer="optimizer",
        contributions=tuple(
            StagedContribution(worker_id=name, weight=1.0, presence=(), payload=b"")
            for name in names
        ),
        total_weight=1.0,
        hyperparameters=(),
        pusher=key(pusher) if pusher else None,
        staleness=7,
    )


def core_of(*, mode: Mode = Mode.BSP) -> ShardCore:
    core = ShardCore([2])
    core.install_record(record({"a": 2, "b": 0, "c": 0}, mode=mode))
    return core


def test_a_push_on_a_shard(tmp_path: Path) -> None:
    history = opened(tmp_path)
    history.opened(PUSH, 3)
    history.trailer(PUSH, trailer([2, 4]))
    history.done(PUSH, Outcome.SKIPPED)
    history.answered(PUSH, REPLY)
    history.pulled(key("a"), REPLY)
    history.close()

    begin, opening, trailing, done, answered, pulled = lines(
        tmp_path / "shard-1-4.jsonl"
    )
    assert (begin["role"], begin["shard"], begin["shard_count"]) == ("shard", 1, 2)
    assert begin["atomicity"] == "chunk"
    assert (opening["type"], opening["push"]) == ("opened", ["a", 1, 3])
    assert trailing["chunks"] == [2, 4]
    assert (done["type"], done["outcome"]) == ("done", "skipped")
    assert (answered["op"], answered["frontier"], answered["bound"]) == ("push", 2, 1)
    assert (pulled["op"], pulled["worker"]) == ("pull", ["a", 1])


def test_an_update_names_the_pushes_whose_bytes_it_has(tmp_path: Path) -> None:
    history = opened(tmp_path)
    effect = update("a", "c")
    told = pushes_of(core_of(), effect)
    assert told == [PushId(key("a"), 3), PushId(key("c"), 5)]

    history.applied(effect, told, ["c"])
    line = lines(tmp_path / "shard-1-4.jsonl")[-1]
    assert (line["chunk"], line["clock"], line["staleness"]) == (2, 5, 7)
    assert (line["pushes"], line["torn"]) == ([["a", 1, 3]], [["c", 1, 5]])


def test_a_push_by_itself_is_told_also_when_its_worker_has_ended() -> None:
    core = core_of(mode=Mode.ASP)
    effect = update("a", pusher="a")
    assert pushes_of(core, effect) == [PushId(key("a"), 3)]

    end = departure("a", base_clock=2, last_clock=5)
    core.install_record(
        record({"b": 0}, generation=2, departures=(end,), mode=Mode.ASP)
    )
    assert pushes_of(core, effect) == [PushId(key("a"), 3)]


def test_records_are_the_same_on_both_sides(tmp_path: Path) -> None:
    end = departure("c", last_clock=4, evicted=True)
    newest = record({"a": 2}, generation=3, departures=(end,))
    shard, coordinator = (
        opened(tmp_path),
        CoordinatorHistory.open(f"{tmp_path}/{{process}}.txt", SETTINGS),
    )
    shard.installed(newest, 5)
    coordinator.persisted(newest)

    on_shard = lines(tmp_path / "shard-1-4.jsonl")[-1]
    on_coordinator = lines(tmp_path / "coordinator.txt")[-1]
    assert on_shard.items() >= record_values(newest).items()
    assert on_coordinator.items() >= record_values(newest).items()
    assert on_shard["members"] == [["a", 1, 2, 0]]
    assert on_shard["departures"] == [["c", 1, 4, True]]
    assert on_shard["torn"] == 5


def test_fences_and_cuts(tmp_path: Path) -> None:
    shard = opened(tmp_path)
    holding = WorkerHolding(worker=key("a"), complete_sequence=4, touched_sequence=3)
    shard.fence(
        FenceReport(
            fence_number=9,
            holdings=(holding,),
            trailer_clock_max=4,
            touched_clock_max=3,
            applied_clock=3,
            frontier=3,
        )
    )
    shard.copying(Cut(2, 8), 8)
    report, cut = lines(tmp_path / "shard-1-4.jsonl")[-2:]
    assert (report["fence"], report["holdings"]) == (9, [["a", 1, 4, 3]])
    assert (cut["snapshot"], cut["clock"]) == (2, 8)

    coordinator = CoordinatorHistory.open(f"{tmp_path}/", SETTINGS)
    coordinator.sent(
        Prepare(
            fence_number=9,
            kind=FenceKind.MEMBERSHIP,
            seeder=None,
            evicting=(key("a"),),
        )
    )
    coordinator.sent(Abort(fence_number=9, reason="why"))
    coordinator.sent(
        DecideCut(fence_number=10, snapshot_id=2, clock=8, sequences=((key("a"), 4),))
    )
    coordinator.close()
    begin, fence, abort, decided = lines(tmp_path / "coordinator.jsonl")
    assert begin["role"] == "coordinator"
    assert (fence["type"], fence["evicting"]) == ("fence", [["a", 1]])
    assert (abort["type"], abort["reason"]) == ("abort", "why")
    assert (decided["type"], decided["sequences"]) == ("cut", [["a", 1, 4]])


def test_without_a_path_nothing_is_written() -> None:
    shard = ShardHistory.open("", shard_index=0, incarnation=1, settings=SETTINGS)
    shard.opened(PUSH, 3)
    assert not shard.is_kept
    shard.applied(update("a"), [], ())
    shard.close()
    coordinator = CoordinatorHistory.open("", SETTINGS)
    coordinator.persisted(record({"a": 0}))
    coordinator.sent(Abort(fence_number=1, reason=""))
    coordinator.close()
