"""What a worker that waits hears of shards, and tells the coordinator."""

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason, Refusal
from psworker.member.membership import Membership
from psworker.member.shard_reach import ShardReach, ShardSilence
from psworker.transport.calls import CallError
from psworker.transport.values import ShardAddress, WorkerView

if TYPE_CHECKING:
    from psworker.member.shard_reach import ShardClients

TIMEOUT_S = 20.0
WORKER = WorkerKey("w0", 1)


class Shards:
    """Clients of two shards, of which some give no answer.

    Attributes:
        silent: Those that give none.
        refusing: Those that refuse.
        told: What the coordinator was told, in order.
    """

    def __init__(self, lease_s: float = 0.02) -> None:
        self.silent: set[int] = set()
        self.refusing: set[int] = set()
        self.told: list[Mapping[int, int]] = []
        self.news = asyncio.Event()
        self.membership = Membership(WORKER)
        addresses = tuple(ShardAddress(i, f"host:{i}", 1) for i in range(2))
        self.membership.take(WorkerView(None, addresses))
        self.reach = ShardReach(cast("ShardClients", self), self._tell, lease_s=lease_s)

    async def of(self, index: int) -> Any:  # noqa: ANN401, a client's one method
        async def get_session(worker: WorkerKey, *, timeout_s: float) -> None:
            assert worker == WORKER
            assert timeout_s == self.reach.pause_s
            if index in self.silent:
                raise CallError("", "UNAVAILABLE", "", refusal=None, decided=False)
            if index in self.refusing:
                refusal = Refusal(ErrorReason.RECOVERING, "not yet")
                raise CallError("", "UNAVAILABLE", "", refusal=refusal, decided=True)

        return SimpleNamespace(get_session=get_session)

    def waiting(self) -> ShardSilence:
        return ShardSilence(self.reach, 1, lambda _: None)

    async def until(self, condition: Callable[[Mapping[int, int]], bool]) -> None:
        """Returns once the coordinator was told something."""
        async with asyncio.timeout(TIMEOUT_S):
            while not any(condition(each) for each in self.told):
                self.news.clear()
                await self.news.wait()

    async def _tell(self, silent_ms: Mapping[int, int]) -> None:
        self.told.append(silent_ms)
        self.news.set()


async def test_silence_of_a_lease_is_told_with_what_other_shards_do() -> None:
    shards = Shards()
    shards.silent = {1}
    with shards.waiting():
        await shards.until(lambda told: told.get(1, 0) >= 20)

    assert shards.membership.unreached == "shard 1 at host:1"
    assert all(told.get(0, 0) >= 0 for told in shards.told)
    await shards.reach.close()


async def test_a_shard_that_has_done_what_was_wanted_is_told_to_answer() -> None:
    shards = Shards()
    shards.silent = {1}
    with shards.waiting() as silence:
        silence.answered(0)
        await shards.until(lambda told: told.get(1, 0) >= 20)
        assert not any(0 in told for told in shards.told)
        silence.answered(1)
        await shards.until(lambda told: told == {1: 0})

    assert shards.membership.unreached == ""
    await shards.reach.close()


async def test_a_wait_that_ends_without_an_answer_does_not_claim_one() -> None:
    shards = Shards()
    shards.silent = {1}
    with shards.waiting() as silence:
        silence.answered(0)
        await shards.until(lambda told: told.get(1, 0) >= 20)
    await shards.reach.close()

    assert {1: 0} not in shards.told


@pytest.mark.parametrize("heard_every_s", [50, 250, 500, 5_000])
async def test_who_reaches_a_shard_reports_it_before_that_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, heard_every_s: int
) -> None:
    """However often the shard says whom it waits for, so that nobody need ask it.

    The coordinator forgets a report after a lease, and evicts another worker that
    can't reach the shard by what it knows of this one.
    """
    shards = Shards(lease_s=1_000.0)
    reported_s: list[int] = []
    now_s = 0
    monkeypatch.setattr("psworker.member.shard_reach.now", lambda: float(now_s))
    with shards.waiting() as silence:
        silence.answered(0)
        for now_s in range(50, 3_001, 50):
            if now_s % heard_every_s == 0:
                silence.heard(1)
            told_count = len(shards.told)
            silence._look()
            if silence._asking is not None:
                await silence._asking
            if len(shards.told) > told_count:
                reported_s.append(now_s)
    await shards.reach.close()

    assert reported_s == [500, 1_000, 1_500, 2_000, 2_500, 3_000]
    assert all(told[1] < 500_000 for told in shards.told)


async def test_nobody_is_asked_before_half_a_lease() -> None:
    shards = Shards(lease_s=1_000.0)
    shards.silent = {0, 1}
    with shards.waiting() as silence:
        await asyncio.sleep(0)
        silence.answered(0)
        silence.answered(1)
    await shards.reach.close()

    assert shards.told == []


async def test_a_refusal_is_an_answer() -> None:
    shards = Shards()
    shards.refusing = {1}
    assert await shards.reach.answering([0, 1]) == {0, 1}
    shards.silent = {0}
    assert await shards.reach.answering([0, 1]) == {1}


async def test_the_shards_that_keep_a_worker_from_joining_are_named_and_told() -> None:
    shards = Shards()
    now = asyncio.get_running_loop().time()
    assert await shards.reach.unreached(now) == ""
    assert shards.told == []
    shards.silent = {0, 1}

    assert await shards.reach.unreached(now - 5.0) == (
        "an answer from shard 0 at host:0 and shard 1 at host:1"
    )
    (told,) = shards.told
    assert told.keys() == {0, 1}
    assert min(told.values()) >= 5_000


async def test_who_is_evicted_is_told_the_shard_if_that_is_why() -> None:
    shards = Shards()
    cause = shards.membership.eviction_cause
    assert cause == "the coordinator had no sign of life from it for a lease"
    await shards.reach.report({0: 0.0, 1: 0.02})

    assert shards.membership.eviction_cause == (
        "it gets no answer from shard 1 at host:1, and others do"
    )


async def test_a_coordinator_that_is_away_stops_no_wait() -> None:
    shards = Shards()

    async def fail(_: Mapping[int, int]) -> None:
        raise CallError("", "UNAVAILABLE", "", refusal=None, decided=False)

    reach = ShardReach(cast("ShardClients", shards), fail, lease_s=0.02)
    await reach.report({1: 5.0})

    assert shards.membership.unreached == "shard 1 at host:1"


async def test_who_waits_to_be_a_member_tells_of_all_shards_while_it_does() -> None:
    """Of those that answer, too: only so is it known that others can't reach them."""
    shards = Shards()
    shards.silent = {1}
    await shards.reach.watch()
    await shards.until(lambda told: told[1] >= 20 > told[0])
    assert shards.membership.unreached == "shard 1 at host:1"
    shards.silent = set()
    shards.told.clear()
    await shards.until(lambda told: told[1] < 20)
    await shards.reach.end_watch()

    assert shards.membership.unreached == ""
    told_count = len(shards.told)
    await asyncio.sleep(3 * shards.reach.pause_s)
    assert len(shards.told) == told_count


async def test_of_shards_that_are_not_there_yet_nothing_is_told() -> None:
    shards = Shards()
    addresses = (ShardAddress(0, "host:0", 1), ShardAddress(1, "", 0))
    shards.membership.take(WorkerView(None, addresses))
    await shards.reach.watch()
    await shards.until(lambda told: 0 in told)
    await shards.reach.end_watch()

    assert all(told.keys() == {0} for told in shards.told)
