"""Clocks in which a late worker steps where the others publish, or the reverse.

Only one kind of pushes counts in a clock, on every shard and in each of its chunks, be
it that a worker is evicted half-way.
"""

from dataclasses import replace

import pytest

from psserver.coordinator.core.fence import ActiveFence, MembershipChange
from psserver.coordinator.core.membership_change import membership_record
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.shard.core.effects import ApplyChunk
from psserver.shard.core.push import PushId
from pswire.membership import FenceKind, Outcome, Record
from tests.doubles.core_values import key, push_id, trailer
from tests.doubles.driven_shard import DrivenShard

BOTH_KINDS = pytest.mark.parametrize("longest_publishes", [True, False])


class TwoShards:
    """`b` is the longest; `a` has joined after clock 1 and does something else.

    Attributes:
        shards: Both, in clock 2.
    """

    def __init__(
        self, *, longest_publishes: bool, nonfinite: str = "", rest: str = ""
    ) -> None:
        bases = {"a": 1, "b": 0, **dict.fromkeys(rest, 1)}
        self.shards = [DrivenShard(bases, [0, 1]) for _ in range(2)]
        self._publishes = {"a": not longest_publishes, "b": longest_publishes}
        self._nonfinite = nonfinite
        for shard in self.shards:
            shard.step("b", 1, [0, 1])
            shard.forget()

    def send_trailer(self, shard: DrivenShard, name: str) -> None:
        what = trailer([0, 1], finite=name != self._nonfinite)
        if self._publishes[name]:
            values = frozenset({3})
            what = replace(what, publishes=True, value_entries=values)
        shard.send_trailer(self.push_of(name), what)

    def send(self, shard: DrivenShard, name: str, *chunks: int) -> None:
        """Sends the trailer of a push and some of its chunks."""
        self.send_trailer(shard, name)
        for index in chunks:
            shard.send_chunk(self.push_of(name), index)

    def fence(self, **change: object) -> Record:
        """Decides a fence from the reports of both, and installs its record."""
        known = self.shards[0].core.clocks.record
        assert known is not None
        number = known.generation + 1
        fence = ActiveFence(number, FenceKind.MEMBERSHIP, 0)
        fence.change = MembershipChange(**change)  # type: ignore[arg-type]
        for index, shard in enumerate(self.shards):
            shard.freeze(number, evicting=[w.worker_id for w in fence.evicting])
            report = shard.reports()[-1]
            assert report.fence_number == number
            fence.reports[index] = report
        decided = membership_record(
            fence, known, CoordinatorSettings(job_id="job", shard_count=2)
        )
        for shard in self.shards:
            shard.install(decided)
            shard.apply_all()
        return decided

    def outcomes_of(self, name: str) -> list[Outcome]:
        """What became of a push in clock 2, for each shard that has answered."""
        push = self.push_of(name)
        replies = (shard.replies().get(push) for shard in self.shards)
        return [reply.outcome for reply in replies if reply is not None]

    def applied(self) -> list[list[tuple[int, str]]]:
        """For each shard, the chunks of clock 2 and of whose pushes they are."""
        return [
            [
                (order.chunk_index, "".join(p.worker_id for p in order.contributions))
                for order in shard.of(ApplyChunk)
                if order.clock == 2
            ]
            for shard in self.shards
        ]

    @staticmethod
    def push_of(name: str) -> PushId:
        return push_id(name, 2 if name == "b" else 1)


@BOTH_KINDS
def test_a_clock_stays_what_a_chunk_of_it_was_applied_as(
    *, longest_publishes: bool
) -> None:
    """Its longest contributor is evicted with the other chunk on its way."""
    job = TwoShards(longest_publishes=longest_publishes)
    for shard in job.shards:
        job.send(shard, "a", 0, 1)
        job.send(shard, "b", 0)
        shard.apply_all()
    job.fence(evictions=(key("b"),))

    assert job.applied() == [[(0, "b")], [(0, "b")]]
    assert job.outcomes_of("a") == [Outcome.DROPPED] * 2
    for shard in job.shards:
        shard.step("a", 2, [0, 1])
        assert shard.replies()[push_id("a", 2)].outcome is Outcome.APPLIED


@BOTH_KINDS
def test_a_clock_is_on_every_shard_what_one_has_applied_it_as(
    *, longest_publishes: bool
) -> None:
    """The first shard is done with it, the second has not heard of the longest."""
    job = TwoShards(longest_publishes=longest_publishes)
    first, second = job.shards
    job.send(first, "b", 0, 1)
    job.send(first, "a", 0, 1)
    first.apply_all()
    job.send(second, "a", 0, 1)
    job.fence(evictions=(key("b"),))

    assert job.applied() == [[(0, "b"), (1, "b")], []]
    assert job.outcomes_of("a") == [Outcome.DROPPED] * 2
    assert [s.core.clocks.applied_clock for s in job.shards] == [2, 2]


@BOTH_KINDS
def test_a_record_after_that_does_not_change_it(*, longest_publishes: bool) -> None:
    """The second shard hears of what is dropped only after another worker has come."""
    job = TwoShards(longest_publishes=longest_publishes)
    first, second = job.shards
    job.send(first, "b", 0, 1)
    job.send(first, "a", 0, 1)
    first.apply_all()
    job.fence(evictions=(key("b"),))
    job.fence(joins=(key("c"),))
    job.send(second, "a", 0, 1)
    second.apply_all()

    assert job.applied() == [[(0, "b"), (1, "b")], []]
    assert job.outcomes_of("a") == [Outcome.DROPPED] * 2


def test_a_clock_that_no_shard_has_begun_is_of_whoever_is_left() -> None:
    job = TwoShards(longest_publishes=True)
    for shard in job.shards:
        job.send(shard, "a", 0, 1)
        job.send_trailer(shard, "b")
    job.fence(evictions=(key("b"),))

    assert job.applied() == [[(0, "a"), (1, "a")]] * 2
    assert job.outcomes_of("a") == [Outcome.APPLIED] * 2


def test_a_skipped_clock_drops_on_every_shard_what_it_drops_on_one() -> None:
    """The longest, whose step is not finite, is evicted before the second has it."""
    job = TwoShards(longest_publishes=False, nonfinite="b")
    first, second = job.shards
    job.send_trailer(first, "b")
    job.send(first, "a", 0, 1)
    job.send(second, "a", 0, 1)
    job.fence(evictions=(key("b"),))

    assert job.applied() == [[], []]
    assert job.outcomes_of("a") == [Outcome.DROPPED] * 2


def test_who_is_idle_ends_a_clock_of_which_nobody_is_left() -> None:
    job = TwoShards(longest_publishes=True, rest="c")
    for shard in job.shards:
        shard.push("c", weight=0.0)
        job.send(shard, "a", 0, 1)
        job.send(shard, "b", 0)
        shard.apply_all()
    job.fence(evictions=(key("b"),))

    assert job.applied() == [[(0, "b")], [(0, "b")]]
    assert job.outcomes_of("a") == [Outcome.DROPPED] * 2
    assert job.outcomes_of("c") == [Outcome.APPLIED] * 2


def test_a_step_that_is_dropped_has_no_say_in_whether_its_clock_is_skipped() -> None:
    """Nor at a fence in the middle of that clock."""
    job = TwoShards(longest_publishes=True, nonfinite="a")
    first, second = job.shards
    for shard in job.shards:
        job.send_trailer(shard, "a")
    job.send(first, "b", 0, 1)
    first.apply_all()
    job.send(second, "b", 0)
    second.apply_all()
    job.fence(joins=(key("c"),))
    second.send_chunk(job.push_of("b"), 1)
    second.apply_all()

    assert job.applied() == [[(0, "b"), (1, "b")]] * 2
    assert job.outcomes_of("b") == [Outcome.APPLIED] * 2
    assert job.outcomes_of("a") == [Outcome.DROPPED] * 2
