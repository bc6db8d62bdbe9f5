"""What of a shard's protocol is in a checkpoint."""

import json
from dataclasses import replace

import pytest

from psserver.edge.fence_report import RANGE_COUNT_MAX, WorkerHolding
from psserver.shard.core.core_image import CoreImage, WindowImage
from psserver.shard.core.shard_fence import Cut
from pswire.leased_data import DataRange
from pswire.membership import CutPurpose, FenceKind, Mode, Outcome
from tests.doubles.core_values import departure, key, push_id, trailer
from tests.doubles.driven_shard import DrivenShard


def image_of(shard: DrivenShard) -> CoreImage:
    core = shard.core
    return CoreImage.of(core.clocks, core.on_shard, core.state.used, core.state.paces)


def ranged(start: int) -> tuple[DataRange, ...]:
    return (DataRange("data", 0, start, start + 8),)


def test_it_has_of_each_member_what_is_done_and_no_more() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0], mode=Mode.ASP)
    shard.send_ranges("a", 1, start=0)
    shard.send_ranges("a", 2, start=8)
    shard.apply_all()
    shard.core.acknowledge(key("a"), 2)
    shard.send_trailer(push_id("a", 3), replace(trailer([0]), ranges=ranged(16)))
    shard.send_chunk(push_id("b", 1), 0)

    image = image_of(shard)

    assert image.windows == (
        WindowImage(
            worker=key("a"),
            done_sequence=2,
            outcomes=((2, Outcome.APPLIED),),
            ranges=((1, ranged(0)[0]), (2, ranged(8)[0])),
        ),
        WindowImage(worker=key("b"), done_sequence=0),
    )
    assert (image.version, image.frontier) == (2, 0)
    assert image.holdings[0] == WorkerHolding(
        worker=key("a"),
        complete_sequence=2,
        trailer_sequence=2,
        touched_sequence=2,
        ranges=((1, ranged(0)[0]), (2, ranged(8)[0])),
    )


def test_it_has_the_settings_of_the_newest_update_of_each_optimizer() -> None:
    shard = DrivenShard({"a": 0}, [0])
    for sequence, name, rate in (
        (1, "first", 0.5),
        (2, "other", 0.25),
        (3, "first", 0.125),
    ):
        push = push_id("a", sequence)
        what = trailer([0], optimizer=name, rate=rate)
        shard.send_trailer(
            push, replace(what, scheduler_steps=(sequence,), spec_digest="later")
        )
        shard.send_chunk(push, 0)
        shard.apply_all()

    image = image_of(shard)

    used = {
        name: (each.hyperparameters, each.scheduler_steps, each.spec_digest)
        for name, each in image.used.items()
    }
    assert used == {
        "first": (((0.125,),), (3,), "later"),
        "other": (((0.25,),), (2,), "later"),
    }
    assert (image.applied_clock, image.version) == (3, 3)


def test_whoever_has_ended_is_in_the_version_alone() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    shard.push("a", chunks=[0])
    shard.step("b", 1, [0])
    gone = departure("b", last_clock=1)
    shard.depart({"a": 0}, gone, steps=1)
    image = image_of(shard)
    assert [window.worker for window in image.windows] == [key("a")]
    assert image.version == 2


def test_a_cut_has_it_for_a_checkpoint_alone() -> None:
    for purpose in CutPurpose:
        shard = DrivenShard({"a": 0}, [0], mode=Mode.ASP)
        shard.freeze(2, FenceKind.CUT)
        shard.core.decide_cut(2, Cut(9, 0, {key("a"): 1}, purpose))
        shard.step("a", 1, [0])
        (copy,) = shard.copies()
        if purpose is CutPurpose.CHECKPOINT:
            assert copy.core is not None
            assert copy.core.windows[0].done_sequence == 1
        else:
            assert copy.core is None


def full_image() -> CoreImage:
    return CoreImage(
        version=7,
        applied_clock=3,
        frontier=2,
        windows=(
            WindowImage(
                worker=key("ä/2"),
                done_sequence=3,
                outcomes=((2, Outcome.SKIPPED), (3, Outcome.DROPPED)),
                ranges=((1, ranged(0)[0]), (3, DataRange("über", 4, 5, 6))),
            ),
        ),
        used={
            "a/b": replace(
                trailer(weight=0.0, optimizer="a/b"),
                hyperparameters=((0.1, 1e-300), (3.0,)),
                scheduler_steps=(4, 5),
                spec_digest="digest",
            )
        },
        paces={"a/b": (3, 0)},
    )


def test_json_holds_all_of_it() -> None:
    assert CoreImage.from_json(full_image().to_json()) == full_image()


@pytest.mark.parametrize(
    "damage",
    [
        {"version": "x"},
        {"windows": [[]]},
        {"windows": [{"worker": ["a", 1], "done_sequence": 1, "outcomes": [[1, 99]]}]},
        {"used": {"optimizer": {"hyperparameters": 1}}},
        {"used": 3},
        {"paces": {"optimizer": 1}},
    ],
)
def test_other_json_is_refused(damage: dict[str, object]) -> None:
    text = json.dumps(json.loads(full_image().to_json()) | damage)
    with pytest.raises(ValueError, match="no state of a shard's protocol"):
        CoreImage.from_json(text)


@pytest.mark.parametrize("text", ["", "[]", "{}", "1"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no state of a shard's protocol"):
        CoreImage.from_json(text)


def test_of_many_ranges_the_coordinator_hears_the_newest() -> None:
    ranges = tuple((number, ranged(8 * number)[0]) for number in range(1, 9_001))
    windows = tuple(
        WindowImage(worker=key(name), done_sequence=9_000, ranges=ranges)
        for name in "abc"
    )
    image = CoreImage(
        version=27_000, applied_clock=9_000, frontier=9_000, windows=windows, used={}
    )

    for holding in image.holdings:
        assert holding.ranges == ranges[-len(holding.ranges) :]
        assert len(holding.ranges) == RANGE_COUNT_MAX // 3
