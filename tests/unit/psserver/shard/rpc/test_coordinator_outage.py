"""When a shard holds its calls because nobody tells it anything."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc import coordinator_outage
from psserver.shard.rpc.coordinator_outage import Silence
from tests.doubles.served_shard import TIMEOUT_S, ServedShard

LEASE_MS = 40


@pytest.fixture
async def host() -> AsyncIterator[ShardHost]:
    with ServedShard(lease_ttl_ms=LEASE_MS) as shard:
        shard.start("a")
        yield shard.host


class Clock:
    """What the shard takes for the time; timers run by the real one."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(coordinator_outage, "now_ms", made)
    return made


async def silent_since(host: ShardHost) -> int:
    assert await host.changes.wait_until(
        lambda: host.silent_since_ms is not None, TIMEOUT_S
    )
    assert host.silent_since_ms is not None
    return host.silent_since_ms


async def lease_is_over() -> None:
    """Returns when a timer that was set for a lease before has fired."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(2 * LEASE_MS / 1000, over.set)
    await over.wait()


async def test_a_watch_that_is_broken_for_a_lease_freezes_the_shard(
    host: ShardHost, clock: Clock
) -> None:
    silence = Silence(host)
    silence.opened()
    before_ms = clock.ms
    silence.broke()
    clock.ms += LEASE_MS - 1
    await lease_is_over()
    assert not host.model.core.is_frozen

    clock.ms += 1

    assert await silent_since(host) == before_ms
    assert host.model.core.is_frozen
    silence.close()


async def test_it_goes_on_when_the_watch_is_back(host: ShardHost, clock: Clock) -> None:
    silence = Silence(host)
    silence.broke()
    clock.ms += LEASE_MS
    await silent_since(host)

    silence.opened()

    assert host.silent_since_ms is None
    assert not host.model.core.is_frozen


async def test_a_watch_that_is_back_in_time_holds_nothing(
    host: ShardHost, clock: Clock
) -> None:
    silence = Silence(host)
    silence.opened()
    silence.broke()
    silence.opened()
    clock.ms += LEASE_MS
    await lease_is_over()

    assert host.silent_since_ms is None


async def test_an_answer_while_the_watch_is_broken_counts(
    host: ShardHost, clock: Clock
) -> None:
    silence = Silence(host)
    silence.broke()
    clock.ms += LEASE_MS // 2
    silence.heard()
    heard_ms = clock.ms
    clock.ms += LEASE_MS - 1
    await lease_is_over()
    assert host.silent_since_ms is None

    clock.ms += 1

    assert await silent_since(host) == heard_ms
    silence.close()
