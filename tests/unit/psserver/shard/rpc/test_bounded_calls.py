"""What a call may keep of a shard's memory, and for how long."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import pytest
import torch

from psserver.edge.limits import DEFAULT_LIMITS, Limits
from psserver.shard.core.push import PushId
from psserver.shard.host import hosted_members
from psserver.shard.host.hosted_members import CALLS_OF_WORKER_MAX
from psserver.shard.rpc.optimizer_state_calls import HEADER_BYTES_MAX
from pswire.frames import REQUEST_HEADER_FIELD, join_fields
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import Mode
from pswire.optimizer_states import StateKey, encode_state
from pswire.reasons import CATALOGUE, ErrorReason, Refusal
from pswire.v1 import membership_pb2, push_pb2
from pswire.v1 import parameter_service_pb2 as messages
from tests.doubles.core_values import key
from tests.doubles.served_shard import NO_CONTEXT, OpenPull, OpenPush, ServedShard
from tests.unit.psserver.shard.rpc.conftest import Make

TIMEOUT_S = 30.0

UNREAD_MAX: Final = DEFAULT_LIMITS.worker_answers


class Requests:
    """Messages of a call, which goes on in silence after them.

    Attributes:
        read_count: Messages that were read.
    """

    def __init__(self, *messages: bytes) -> None:
        self.read_count = 0
        self._messages = messages
        self._more = asyncio.Event()
        self.is_silent = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for message in self._messages:
            self.read_count += 1
            yield message
        self.is_silent.set()
        await self._more.wait()

    def end(self) -> None:
        self._more.set()


def target(name: str, **others: Any) -> dict[str, Any]:  # noqa: ANN401, fields
    return {
        "protocol_version": PROTOCOL_VERSION,
        "job_id": "job",
        "worker": membership_pb2.WorkerIdentity(worker_id=name, incarnation=1),
        "shard_incarnation": 1,
        **others,
    }


def state_header(name: str, **others: Any) -> bytes:  # noqa: ANN401, fields
    fields = {"generation": 1, "sequence": 1, "optimizer": "optimizer", **others}
    header = messages.StageOptimizerStateHeader(**target(name, **fields))
    return join_fields((1, header.SerializeToString()))


def state_part() -> bytes:
    (state,) = encode_state({StateKey(0, 1, "momentum_buffer"): torch.zeros(4)})
    part = push_pb2.OptimizerStatePart(
        chunk_index=0, optimizer="optimizer", tensors=state
    )
    return join_fields((2, part.SerializeToString()))


def seed_header(name: str, fence_number: int) -> bytes:
    header = messages.SeedHeader(**target(name, fence_number=fence_number))
    return join_fields((REQUEST_HEADER_FIELD, header.SerializeToString()))


async def refusal_of(call: Any) -> Refusal:  # noqa: ANN401, any call
    with pytest.raises(Refusal) as caught:
        await asyncio.wait_for(call, TIMEOUT_S)
    return caught.value


@pytest.mark.parametrize("method", ["push_pull", "push", "push_pull_once"])
async def test_a_push_of_a_stranger_is_refused_by_its_header(
    make: Make, method: str
) -> None:
    """Whatever else it has sent is not looked at."""
    shard = make()
    shard.start(["a"])
    garbage = join_fields((2, b"\xff"), (3, b"\xff"))
    requests = Requests(shard.header("a", 1, job_id="other") + garbage)
    requests.end()

    call = getattr(shard.service, method)(aiter(requests), NO_CONTEXT)
    found = await refusal_of(call if method == "push" else anext(call))

    assert found.reason is ErrorReason.JOB_UNKNOWN


async def test_a_seed_of_a_stranger_is_refused_by_its_header(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: a job that has begun is seeded by nobody."""
    monkeypatch.setattr("psserver.shard.rpc.seed_call.WAITING_INTERVAL_MS", 60_000)
    shard = make()
    shard.start(["a"])
    requests = Requests(seed_header("stranger", 12345), bytes(1 << 20))

    found = await refusal_of(shard.service.seed(aiter(requests), NO_CONTEXT))

    assert found.reason is ErrorReason.WORKER_INCARNATION_STALE
    assert requests.read_count == 1


async def test_state_of_a_stranger_is_refused_by_its_header(make: Make) -> None:
    shard = make()
    shard.start(["a"])
    requests = Requests(state_header("stranger"), state_part())

    found = await refusal_of(
        shard.service.stage_optimizer_state(aiter(requests), NO_CONTEXT)
    )

    assert found.reason is ErrorReason.WORKER_INCARNATION_STALE
    assert requests.read_count == 1


@pytest.mark.parametrize("method", ["seed", "stage_optimizer_state"])
async def test_the_first_message_is_the_header_alone(make: Make, method: str) -> None:
    shard = make()
    shard.start(["a"])
    first = seed_header("a", 1) if method == "seed" else state_header("a")
    requests = Requests(first + join_fields((3, bytes(HEADER_BYTES_MAX))))

    found = await refusal_of(getattr(shard.service, method)(aiter(requests), None))

    assert found.reason is ErrorReason.LIMIT_EXCEEDED
    assert "its header alone" in found.message


async def test_a_worker_stages_by_one_call_at_a_time(make: Make) -> None:
    shard = make()
    shard.start(["a", "b"])
    calls = []
    for name in ("a", "b", "a"):
        requests = Requests(state_header(name), state_part())
        staging = shard.service.stage_optimizer_state(aiter(requests), NO_CONTEXT)
        calls.append((asyncio.create_task(_awaited(staging)), requests))
        await asyncio.wait_for(requests.is_silent.wait(), TIMEOUT_S)

    (older, _), (other, others), (newer, newers) = calls
    assert (await refusal_of(older)).reason is ErrorReason.DRAINING
    for task, requests in ((other, others), (newer, newers)):
        assert not task.done()
        requests.end()
        await asyncio.wait_for(task, TIMEOUT_S)
    assert shard.host.members.of(key("a")).state is not None


async def test_a_call_that_stages_and_is_silent_is_ended(make: Make) -> None:
    shard = make(limits=Limits(message_s=0.01))
    shard.start(["a"])
    requests = Requests(state_header("a"), state_part())

    found = await refusal_of(
        shard.service.stage_optimizer_state(aiter(requests), NO_CONTEXT)
    )

    assert found.reason is ErrorReason.WAIT_TIMEOUT
    assert shard.host.members.of(key("a")).state is None


async def unread_pulls(shard: ServedShard) -> list[OpenPull]:
    """As many as there may be, of which one message is read and no more."""
    calls = [shard.pull("a", 0) for _ in range(UNREAD_MAX)]
    for call in calls:
        call.is_read.clear()
    answers = shard.host.pull_answers
    while answers.count(key("a")) < len(calls):  # noqa: ASYNC110, each has its turn
        await asyncio.sleep(0)
    return calls


async def all_read(calls: Sequence[OpenPull]) -> None:
    for call in calls:
        call.is_read.set()
        await call.finished()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls say at once what they wait for."""
    monkeypatch.setattr("psserver.shard.rpc.readiness.WAITING_INTERVAL_MS", 1)


@pytest.mark.usefixtures("patient")
async def test_one_who_does_not_read_is_sent_no_more_values(make: Make) -> None:
    """One more pull is told what it waits for, and answered once others are read."""
    shard = make()
    shard.start(["a", "b"])
    held = await unread_pulls(shard)
    further = shard.pull("a", 0)

    waiting = await further.until_waiting()
    assert f"to read {UNREAD_MAX} earlier answers" in waiting.reason
    assert not further.values
    await shard.pull("b", 0).finished()  # others are answered

    await all_read(held[:1])
    await further.finished()
    assert further.values
    await all_read(held[1:])
    assert shard.host.pull_answers.count(key("a")) == 0


async def test_pulls_that_are_not_read_hold_up_no_step(make: Make) -> None:
    shard = make()
    shard.start(["a"])
    held = await unread_pulls(shard)

    await shard.push("a", 1).finished()
    once = shard.push_once("a", 2)
    await once.ended()
    assert once.reply is not None
    await all_read(held)


@pytest.mark.usefixtures("patient")
async def test_answers_to_pushes_are_limited_too(make: Make) -> None:
    """A small push is answered without a reply then: it is to be asked for."""
    shard = make()
    shard.start(["a"])
    with ExitStack() as stack:
        for _ in range(UNREAD_MAX):
            stack.enter_context(shard.host.push_answers.taken(key("a")))
        once = shard.push_once("a", 1)
        await once.ended()
        assert once.reply is None
        push = shard.push("a", 2)
        waiting = await push.until_waiting()
        assert f"to read {UNREAD_MAX} earlier answers" in waiting.reason
    await push.finished()
    assert push.values
    assert shard.host.push_answers.count(key("a")) == 0


async def test_a_push_whose_rest_does_not_come_is_ended_and_goes_on(make: Make) -> None:
    """What has come of it stays: the rest may come by another call."""
    shard = make(limits=Limits(message_s=0.01))
    shard.start(["a", "b"])
    call = OpenPush(shard)
    call.send(shard.header("a", 1) + shard.trailer([0, 1]))
    call.send(shard.chunk(0, 1.0))

    found = await refusal_of(call.task)

    assert found.reason is ErrorReason.WAIT_TIMEOUT
    assert CATALOGUE[found.reason].retryable
    assert "the rest of push 1 of a/1 did not come" in found.message
    shard.host.limits = DEFAULT_LIMITS  # which also hold while it waits for the other
    rest = OpenPush(shard)
    rest.send(shard.header("a", 1) + shard.trailer([0, 1]) + shard.chunk(1, 1.0))
    await shard.push("b", 1).finished()
    assert (await rest.finished()).outcome == push_pb2.OUTCOME_APPLIED


async def test_a_push_that_went_ahead_and_is_silent_is_ended(make: Make) -> None:
    shard = make(limits=Limits(step_s=0.01))
    shard.start(["a"])
    call = OpenPush(shard)
    call.send(shard.header("a", 1))
    call.send(shard.chunk(0, 1.0))

    assert (await refusal_of(call.task)).reason is ErrorReason.WAIT_TIMEOUT
    assert shard.ahead_bytes == 0
    await shard.push("a", 1).finished()


async def test_a_slow_backward_pass_may_take_longer_than_a_message(make: Make) -> None:
    shard = make(limits=Limits(message_s=0.0))
    shard.start(["a"])
    call = OpenPush(shard)
    call.send(shard.header("a", 1))
    call.send(shard.chunk(0, 1.0))
    await shard.until(lambda: shard.ahead_bytes > 0)
    call.send(shard.trailer([0]))
    await call.finished()


async def pushed(shard: ServedShard, name: str, count: int) -> None:
    for sequence in range(1, count + 1):
        await shard.push(name, sequence).finished()


async def sent_again(shard: ServedShard, name: str, count: int) -> list[OpenPush]:
    """Pushes that are done, by calls that say no more and do not end."""
    calls = []
    for sequence in range(1, count + 1):
        calls.append(OpenPush(shard))
        header = shard.header(name, sequence, sequence_unacknowledged_min=1)
        calls[-1].send(header + shard.trailer([0, 1]))
        await settled()
    return calls


async def ended(calls: Sequence[OpenPush]) -> None:
    for call in calls:
        call.task.cancel()
    await asyncio.gather(*(call.task for call in calls), return_exceptions=True)


async def settled() -> None:
    """Returns once all calls have taken what was sent to them."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_worker_has_so_many_calls_that_push(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its oldest is ended: it has no use for it."""
    monkeypatch.setattr("psserver.shard.rpc.parameter_service.WAITING_INTERVAL_MS", 10)
    shard = make()
    shard.start(["a"], mode=Mode.ASP)
    await pushed(shard, "a", CALLS_OF_WORKER_MAX + 2)
    calls = await sent_again(shard, "a", CALLS_OF_WORKER_MAX + 2)

    for call in calls[:2]:
        found = await refusal_of(call.task)
        assert found.reason is ErrorReason.DRAINING
        assert f"{CALLS_OF_WORKER_MAX} newer calls" in found.message
    assert not any(call.task.done() for call in calls[2:])
    await ended(calls[2:])
    # None is counted any more.
    again = await sent_again(shard, "a", CALLS_OF_WORKER_MAX)
    assert not any(call.task.done() for call in again)
    await ended(again)


async def test_calls_of_others_are_not_counted(make: Make) -> None:
    shard = make()
    shard.start(["a", "b"], mode=Mode.ASP)
    calls = []
    for name in ("a", "b"):
        await pushed(shard, name, CALLS_OF_WORKER_MAX)
        calls += await sent_again(shard, name, CALLS_OF_WORKER_MAX)

    assert not any(call.task.done() for call in calls)
    await ended(calls)


async def test_a_call_for_small_pushes_that_rests_for_long_ends(make: Make) -> None:
    shard = make(limits=Limits(step_s=0.01))
    shard.start(["a"])

    requests = Requests(shard.whole_push("a", 1))
    call = shard.service.push_pull_once(aiter(requests), NO_CONTEXT)

    async with asyncio.timeout(TIMEOUT_S):
        assert len([answer async for answer in call]) == 1


async def test_a_worker_has_so_few_calls_for_small_pushes(make: Make) -> None:
    shard = make()
    shard.start(["a", "b"], mode=Mode.ASP)
    calls: list[asyncio.Task[list[bytes]]] = []
    core = shard.host.model.core

    async def answers(name: str, sequence: int) -> list[bytes]:
        requests = Requests(shard.whole_push(name, sequence))
        call = shard.service.push_pull_once(aiter(requests), NO_CONTEXT)
        return [answer async for answer in call]

    await shard.push("b", 1).finished()
    for name, sequence in (("b", 2), *(("a", n + 1) for n in range(6))):
        calls.append(asyncio.create_task(answers(name, sequence)))
        await shard.until(lambda n=name, s=sequence: core.closed_sequence(key(n)) >= s)
        await settled()

    over = [call.done() for call in calls]
    few = hosted_members.RESTING_OF_WORKER_MAX
    assert over == [False, *(True,) * (6 - few), *(False,) * few]
    for call in calls:
        if call.done():
            assert len(call.result()) == 1
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.usefixtures("patient")
async def test_one_that_waits_to_be_read_gives_way_too(make: Make) -> None:
    shard = make()
    shard.start(["a"], mode=Mode.ASP)
    await pushed(shard, "a", CALLS_OF_WORKER_MAX)
    with ExitStack() as stack:
        for _ in range(UNREAD_MAX):
            stack.enter_context(shard.host.push_answers.taken(key("a")))
        first = shard.push("a", CALLS_OF_WORKER_MAX + 1)
        await first.until_waiting()
        further = await sent_again(shard, "a", CALLS_OF_WORKER_MAX)

        assert (await refusal_of(first.task)).reason is ErrorReason.DRAINING
    await ended(further)


async def _awaited(call: Any) -> object:  # noqa: ANN401, any call
    return await call


def push_of(name: str) -> PushId:
    return PushId(key(name), 1)
