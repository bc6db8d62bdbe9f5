"""The second phase of a step, with the calls it makes written down."""

import asyncio

import pytest

from pswire.membership import ClockChoice, WorkerKey
from psworker.member.core import OpenPush
from psworker.member.push_calls import Commits

ME = WorkerKey("w0", 1)
OTHER = WorkerKey("w1", 1)
BOTH = ClockChoice(5, (ME, OTHER))
ALONE = ClockChoice(5, (ME,))


class Calls:
    """Writes calls down.

    Attributes:
        committed: Shards and what they were told to commit.
        ready: Clocks and sequences that shard 0 was told of.
        choice: What shard 0 answers.
        refusal: What commits raise.
        answering: Cleared to let commits wait for their answers.
        cancelled_count: Commits that were cancelled meanwhile.
    """

    def __init__(self) -> None:
        self.committed: list[tuple[int, ClockChoice]] = []
        self.ready: list[tuple[int, int]] = []
        self.choice = BOTH
        self.refusal: Exception | None = None
        self.answering = asyncio.Event()
        self.answering.set()
        self.cancelled_count = 0

    async def commit(self, shard_index: int, choice: ClockChoice) -> None:
        self.committed.append((shard_index, choice))
        try:
            await self.answering.wait()
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise
        if self.refusal is not None:
            raise self.refusal

    async def choose(self, clock: int, sequence: int) -> ClockChoice:
        self.ready.append((clock, sequence))
        return self.choice


class Push:
    """A push that two shards are told of, and its commits."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.commits = Commits(OpenPush(ME, 3, [(), ()]), self.calls)
        self.answered = asyncio.Event()
        self.task = asyncio.ensure_future(self.commits.drive_until(self._push()))

    async def settle(self) -> None:
        """Lets everything run that can."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def end(self) -> str:
        self.answered.set()
        return await self.task

    async def _push(self) -> str:
        await self.answered.wait()
        return "answered"


async def test_a_push_that_nobody_stages_needs_no_commit() -> None:
    push = Push()

    assert await push.end() == "answered"
    assert push.calls.committed == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_all_shards_have_staged_is_committed_on_all() -> None:
    push = Push()

    push.commits.take_staged(1, BOTH)
    await push.settle()
    assert push.calls.committed == []
    push.commits.take_staged(0, BOTH)
    await push.settle()

    assert push.calls.committed == [(0, BOTH), (1, BOTH)]
    assert await push.end() == "answered"


async def test_a_shard_that_tells_it_again_is_told_to_commit_again() -> None:
    push = Push()
    for shard_index in (0, 1):
        push.commits.take_staged(shard_index, BOTH)
    await push.settle()

    push.commits.take_staged(1, BOTH)
    await push.settle()

    assert push.calls.committed == [(0, BOTH), (1, BOTH)] * 2
    await push.end()


@pytest.mark.parametrize(
    ("choice", "committed"),
    [(BOTH, [(0, BOTH), (1, BOTH)]), (ClockChoice(5, (OTHER,)), [])],
)
async def test_with_backup_workers_shard_0_chooses_and_the_chosen_commit(
    choice: ClockChoice, committed: list[tuple[int, ClockChoice]]
) -> None:
    push = Push()
    push.calls.choice = choice

    for shard_index in (0, 1):
        push.commits.take_staged(shard_index, ClockChoice(5, ()))
    await push.settle()

    assert push.calls.ready == [(5, 3)]
    assert push.calls.committed == committed
    await push.end()


async def test_what_is_staged_anew_meanwhile_is_committed_afterwards() -> None:
    push = Push()
    push.calls.answering.clear()
    for shard_index in (0, 1):
        push.commits.take_staged(shard_index, BOTH)
    await push.settle()

    for shard_index in (0, 1):
        push.commits.take_staged(shard_index, ALONE)
    await push.settle()
    assert push.calls.committed == [(0, BOTH), (1, BOTH)]
    push.calls.answering.set()
    await push.settle()

    assert push.calls.committed[2:] == [(0, ALONE), (1, ALONE)]
    await push.end()


async def test_a_commit_that_is_refused_ends_the_push() -> None:
    push = Push()
    push.calls.refusal = ConnectionError("refused by the test")

    for shard_index in (0, 1):
        push.commits.take_staged(shard_index, BOTH)

    with pytest.raises(ConnectionError, match="refused by the test"):
        await push.task
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_commits_are_let_end_when_the_push_is_answered_before() -> None:
    """A call that is cancelled costs memory for ever (grpc/grpc#43360)."""
    push = Push()
    push.calls.answering.clear()
    for shard_index in (0, 1):
        push.commits.take_staged(shard_index, BOTH)
    await push.settle()
    push.answered.set()
    await push.settle()
    assert not push.task.done()

    push.calls.answering.set()

    assert await push.task == "answered"
    assert push.calls.cancelled_count == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psworker.member.push_calls.ANSWER_TIMEOUT_S", 0.01)
    push = Push()
    push.calls.answering.clear()
    for shard_index in (0, 1):
        push.commits.take_staged(shard_index, BOTH)
    await push.settle()

    assert await push.end() == "answered"
    assert push.calls.cancelled_count == 2
    assert asyncio.all_tasks() == {asyncio.current_task()}
