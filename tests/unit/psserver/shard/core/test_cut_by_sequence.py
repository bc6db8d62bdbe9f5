"""Cuts in SSP and ASP: of each worker one push, and all up to it."""

from psserver.shard.core.effects import ApplyChunk, CopyImage
from psserver.shard.core.shard_fence import Cut
from pswire.membership import FenceKind, Mode
from tests.doubles.core_values import choice, departure, key, push_id, record, trailer
from tests.doubles.driven_shard import TWO_PHASE, DrivenShard, asp


def cut(shard: DrivenShard, number: int = 2, clock: int = 0, **lasts: int) -> None:
    """Snapshot 9, with of each member its last push that is in."""
    shard.freeze(number, FenceKind.CUT)
    assert shard.reports()[-1].fence_number == number
    sequences = tuple((key(name), last) for name, last in lasts.items())
    shard.core.decide_cut(number, Cut(9, clock, dict(sequences)))


def test_a_cut_of_what_is_done_is_copied_at_once() -> None:
    shard = asp("a", "b")
    shard.step("a", 1, [0])
    shard.step("a", 2, [0])
    cut(shard, a=2, b=0)

    assert [(copy.cut.snapshot_id, copy.clock) for copy in shard.copies()] == [(9, 0)]


def test_each_worker_has_its_own_last_push_in_the_cut() -> None:
    shard = asp("a", "b")
    shard.step("a", 1, [0])
    cut(shard, clock=1, a=2, b=1)
    assert shard.copies() == []
    shard.step("b", 1, [0])
    shard.step("b", 2, [0])
    assert shard.copies() == []
    assert shard.applied() == [("a", 1, 0), ("b", 1, 0)]

    shard.push("a", 2, chunks=[0])
    shard.apply_all()

    assert [copy.clock for copy in shard.copies()] == [1]
    assert shard.applied() == [("a", 1, 0), ("b", 1, 0), ("a", 2, 0), ("b", 2, 0)]


def test_what_is_beyond_the_cut_is_staged_until_its_image_is_ordered() -> None:
    shard = asp("a", "b")
    cut(shard, a=0, b=1)
    shard.push("a", 1, chunks=[0])
    shard.push("b", 1, chunks=[0])
    assert shard.applied() == [("b", 1, 0)]
    assert shard.core.on_shard.window_of(key("a")).entries[1].applied == set()

    shard.apply_all()
    shard.step("b", 2, [0])

    orders = shard.image_orders()
    assert [type(each) for each in orders[:3]] == [ApplyChunk, CopyImage, ApplyChunk]
    assert sorted(shard.applied()[1:]) == [("a", 1, 0), ("b", 2, 0)]
    assert len(shard.copies()) == 1


def test_a_push_that_is_partly_applied_is_in() -> None:
    """Its trailer is here, so that every cut has it."""
    shard = asp("a", "b", chunks=(0, 1))
    shard.send_trailer(push_id("a"), trailer([0, 1]))
    shard.send_chunk(push_id("a"), 0)
    shard.apply_all()
    cut(shard, a=1, b=0)
    shard.step("b", 1, [0, 1])
    assert shard.copies() == []

    shard.send_chunk(push_id("a"), 1)
    shard.apply_all()

    assert len(shard.copies()) == 1
    assert [name for name, _, _ in shard.applied()] == ["a", "a", "b", "b"]


def test_a_push_that_is_skipped_counts_as_in() -> None:
    shard = asp("a")
    cut(shard, a=1)
    shard.push("a", finite=False)
    assert len(shard.copies()) == 1


def test_no_answer_beyond_the_cut_leaves_before_its_image_is_ordered() -> None:
    shard = asp("a", "b")
    cut(shard, a=0, b=1)
    shard.push("a", finite=False)
    assert shard.answered() == []
    shard.step("b", 1, [0])
    assert ("a", 1) in shard.answered()
    assert len(shard.copies()) == 1


def test_an_answer_that_is_blocked_does_not_hold_up_the_cut() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0], mode=Mode.SSP, staleness_bound=0)
    shard.step("a", 1, [0])
    assert shard.answered() == []
    cut(shard, a=1, b=0)

    assert len(shard.copies()) == 1
    shard.step("b", 1, [0])
    assert sorted(shard.answered()) == [("a", 1), ("b", 1)]


def test_complete_pushes_of_departed_workers_are_in() -> None:
    shard = asp("a", "b")
    shard.freeze(2)
    shard.push("b", chunks=[0])
    gone = departure("b", last_clock=1, evicted=True)
    shard.depart({"a": 0}, gone, steps=1)
    shard.freeze(3, FenceKind.CUT)
    shard.apply_all()
    shard.core.decide_cut(3, Cut(9, 0, {key("a"): 0}))
    shard.apply_all()

    assert [type(each) for each in shard.image_orders()] == [ApplyChunk, CopyImage]
    assert shard.core.clocks.version == 1


def test_a_cut_during_a_change_of_mode_waits_for_the_mode_before() -> None:
    """Clocks that BSP still owns are in, of all members."""
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", chunks=[0])
    shard.freeze(2, FenceKind.MODE)
    shard.install(record({"a": 0, "b": 0}, generation=2, mode=Mode.ASP, mode_clock=1))
    cut(shard, 3, clock=1, a=1, b=1)
    assert shard.copies() == []
    shard.step("b", 1, [0])
    shard.push("b", 2, chunks=[0])

    orders = shard.image_orders()
    assert [type(each) for each in orders] == [ApplyChunk, CopyImage, ApplyChunk]
    assert [each.clock for each in orders] == [1, 1, 2]


def test_a_cut_in_bsp_waits_for_pushes_of_the_mode_before() -> None:
    shard = asp("a", "b")
    for sequence in (1, 2):
        shard.step("a", sequence, [0])
    shard.freeze(2, FenceKind.MODE)
    shard.install(
        record(
            {"a": 2, "b": 2},
            generation=2,
            mode_clock=2,
            base_sequences={"a": 2, "b": 1},
        )
    )
    shard.freeze(3, FenceKind.CUT)
    shard.core.decide_cut(3, Cut(9, 2, {key("a"): 2, key("b"): 1}))
    assert shard.copies() == []
    shard.step("b", 1, [0])
    for name, sequence in (("a", 3), ("b", 2)):
        shard.push(name, sequence, chunks=[0])

    orders = shard.image_orders()
    assert [type(each) for each in orders[-3:]] == [ApplyChunk, CopyImage, ApplyChunk]
    assert [each.clock for each in shard.copies()] == [2]
    assert shard.of(ApplyChunk)[-2].pusher == key("b")


def test_a_cut_yields_to_any_other_fence() -> None:
    shard = asp("a", "b")
    cut(shard, a=0, b=1)
    shard.push("a", chunks=[0])
    assert shard.applied() == []
    shard.freeze(3)
    shard.core.abort_fence(3)
    shard.apply_all()
    shard.step("b", 1, [0])

    assert shard.copies() == []
    assert shard.applied() == [("a", 1, 0), ("b", 1, 0)]


def test_a_cut_that_nobody_wants_any_more_holds_nothing_back() -> None:
    shard = asp("a", "b")
    cut(shard, a=0, b=1)
    shard.push("a", chunks=[0])
    shard.core.withdraw_cut(9)
    shard.apply_all()

    assert shard.applied() == [("a", 1, 0)]
    assert shard.copies() == []


def test_nothing_is_staged_for_a_commit_beyond_a_cut_that_is_not_reached() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0], mode=Mode.ASP, rules=TWO_PHASE)
    cut(shard, a=0, b=1)
    shard.push("a", chunks=[0])
    assert shard.staged() == []
    shard.push("b", finite=False)
    shard.core.commit(key("b"), choice(1, "b"))
    assert push_id("a") in [each.push for each in shard.staged()]


def test_the_cut_of_a_job_that_nobody_is_left_of_is_copied() -> None:
    shard = asp("a")
    shard.step("a", 1, [0])
    gone = departure("a", last_clock=1)
    shard.freeze(2)
    shard.depart({}, gone, steps=1)
    cut(shard, 3, clock=1)

    assert [(copy.cut.snapshot_id, copy.clock) for copy in shard.copies()] == [(9, 1)]
