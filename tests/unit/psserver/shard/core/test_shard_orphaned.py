"""A shard that has not heard the coordinator for a lease holds everything.

It may have been given up: what it applied or answered from then on would be lost.
"""

import pytest

from psserver.edge.fence_report import FenceReport
from psserver.shard.core.effects import ApplyChunk, ContributionAwaited
from psserver.shard.core.shard_fence import Cut
from pswire.membership import FenceKind, Mode, Outcome
from tests.doubles.core_values import choice, key, push_id, record, trailer
from tests.doubles.driven_shard import TWO_PHASE, DrivenShard

REASON = "the coordinator, which has been silent for a lease"


MODES = [mode for mode in Mode if not mode.rules.has_quorum]
"""Of a quorum a commit is awaited first; see `test_quorum.py`."""


def orphan(mode: Mode = Mode.BSP, chunks: tuple[int, ...] = (0,)) -> DrivenShard:
    shard = DrivenShard({"a": 0}, chunks, mode=mode)
    shard.core.set_orphaned(True)
    return shard


@pytest.mark.parametrize("mode", MODES)
def test_an_orphan_stages_and_applies_nothing(mode: Mode) -> None:
    shard = orphan(mode)
    shard.push("a", chunks=[0])

    assert shard.of(ApplyChunk) == []
    assert shard.core.is_frozen
    assert shard.core.waiting_reason == REASON
    shard.core.set_orphaned(False)
    assert len(shard.apply_all()) == 1
    assert shard.outcomes() == {"a": Outcome.APPLIED}


@pytest.mark.parametrize("mode", MODES)
def test_a_chunk_that_comes_to_an_orphan_is_not_released(mode: Mode) -> None:
    shard = DrivenShard({"a": 0}, [0, 1], mode=mode)
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 0)
    shard.apply_all()
    shard.core.set_orphaned(True)
    shard.send_chunk(push_id("a"), 1)
    assert shard.apply_all() == []

    shard.core.set_orphaned(False)

    assert [order.chunk_index for order in shard.apply_all()] == [1]


@pytest.mark.parametrize("mode", MODES)
def test_what_was_being_applied_is_not_answered_by_an_orphan(mode: Mode) -> None:
    shard = DrivenShard({"a": 0}, [0], mode=mode)
    shard.push("a", chunks=[0])
    shard.core.set_orphaned(True)
    shard.apply_all()
    assert shard.answered() == []
    assert shard.core.reply_to(push_id("a")) is None
    assert shard.core.done_sequences() == ((key("a"), 0),)

    shard.core.set_orphaned(False)

    assert shard.answered() == [("a", 1)]


@pytest.mark.parametrize("mode", MODES)
def test_an_orphan_gives_no_values(mode: Mode) -> None:
    shard = DrivenShard({"a": 0}, [0], mode=mode)
    shard.step("a", 1, [0])
    shard.core.set_orphaned(True)
    assert not shard.core.admits_pull(key("a"), 1)
    assert not shard.core.admits_values(push_id("a", 2))

    shard.core.set_orphaned(False)

    assert shard.core.admits_pull(key("a"), 1)


@pytest.mark.parametrize("mode", MODES)
def test_an_orphan_answers_no_push_again(mode: Mode) -> None:
    shard = DrivenShard({"a": 0}, [0], mode=mode)
    shard.step("a", 1, [0])
    shard.forget()
    shard.core.set_orphaned(True)
    shard.push("a", chunks=[0])
    assert shard.core.applied_chunks(push_id("a")) == frozenset()
    assert shard.core.reply_to(push_id("a")) is None

    shard.core.set_orphaned(False)

    assert shard.outcomes() == {"a": Outcome.DUPLICATE}


@pytest.mark.parametrize("mode", MODES)
def test_an_orphan_skips_nothing(mode: Mode) -> None:
    shard = orphan(mode)
    shard.push("a", finite=False)
    assert shard.answered() == []
    shard.core.set_orphaned(False)
    assert shard.outcomes() == {"a": Outcome.SKIPPED}


def test_an_orphan_releases_nobody_whom_the_bound_blocked() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0], mode=Mode.SSP, staleness_bound=0)
    shard.step("a", 1, [0])
    shard.push("b", chunks=[0])
    shard.core.set_orphaned(True)
    shard.apply_all()
    assert shard.answered() == []
    shard.core.set_orphaned(False)
    assert sorted(shard.answered()) == [("a", 1), ("b", 1)]


def test_an_orphan_tells_nobody_that_anything_is_staged() -> None:
    shard = DrivenShard({"a": 0}, [0], rules=TWO_PHASE)
    shard.core.set_orphaned(True)
    shard.push("a", chunks=[0])
    assert shard.staged() == []

    shard.core.set_orphaned(False)

    assert [each.choice for each in shard.staged()] == [choice(1, "a")]


def test_an_orphan_asks_no_idle_worker() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.core.set_orphaned(True)
    shard.core.await_contribution(key("b"), 1, 0)
    shard.push("a", chunks=[0])
    assert shard.of(ContributionAwaited) == []
    shard.core.set_orphaned(False)
    assert len(shard.of(ContributionAwaited)) == 1


def test_an_orphan_copies_no_image() -> None:
    shard = DrivenShard({"a": 0}, [0])
    shard.freeze(2, FenceKind.CUT)
    shard.core.set_orphaned(True)
    shard.core.decide_cut(2, Cut(9, 0))
    assert shard.copies() == []
    shard.core.set_orphaned(False)
    assert len(shard.copies()) == 1


def test_being_heard_again_does_not_end_a_fence() -> None:
    shard = orphan()
    shard.freeze(2)
    assert len(shard.of(FenceReport)) == 1
    shard.core.set_orphaned(False)
    shard.push("a", chunks=[0])
    assert shard.of(ApplyChunk) == []
    assert shard.core.waiting_reason == (
        "the coordinator to decide a change of the workers"
    )


def test_a_record_alone_does_not_make_an_orphan_go_on() -> None:
    shard = orphan()
    shard.push("a", chunks=[0])
    shard.install(record({"a": 0}, generation=2))
    assert shard.of(ApplyChunk) == []


def test_saying_it_again_changes_nothing() -> None:
    shard = orphan()
    shard.core.set_orphaned(True)
    shard.push("a", chunks=[0])
    for _ in range(2):
        shard.core.set_orphaned(False)
    assert len(shard.of(ApplyChunk)) == 1
