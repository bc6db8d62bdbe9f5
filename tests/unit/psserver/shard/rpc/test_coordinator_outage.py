"""When a shard holds its calls because nobody tells it anything."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from psserver.edge.monotonic import now_ms
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc.coordinator_outage import Silence
from tests.doubles.served_shard import TIMEOUT_S, ServedShard

LEASE_MS = 40


@pytest.fixture
async def host() -> AsyncIterator[ShardHost]:
    with ServedShard(lease_ttl_ms=LEASE_MS) as shard:
        shard.start("a")
        yield shard.host


async def silent_since(host: ShardHost) -> int:
    assert await host.changes.wait_until(
        lambda: host.silent_since_ms is not None, TIMEOUT_S
    )
    assert host.silent_since_ms is not None
    return host.silent_since_ms


async def test_a_watch_that_is_broken_for_a_lease_freezes_the_shard(
    host: ShardHost,
) -> None:
    silence = Silence(host)
    silence.opened()
    before = now_ms()
    silence.broke()
    assert not host.model.core.is_frozen

    since_ms = await silent_since(host)

    assert now_ms() - before >= LEASE_MS
    assert since_ms <= before
    assert host.model.core.is_frozen
    silence.close()


async def test_it_goes_on_when_the_watch_is_back(host: ShardHost) -> None:
    silence = Silence(host)
    silence.broke()
    await silent_since(host)

    silence.opened()

    assert host.silent_since_ms is None
    assert not host.model.core.is_frozen


async def test_a_watch_that_is_back_in_time_holds_nothing(host: ShardHost) -> None:
    silence = Silence(host)
    silence.opened()
    silence.broke()
    silence.opened()
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(2 * LEASE_MS / 1000, over.set_result, None)
    await over

    assert host.silent_since_ms is None


async def test_an_answer_while_the_watch_is_broken_counts(host: ShardHost) -> None:
    silence = Silence(host)
    silence.broke()
    loop = asyncio.get_running_loop()
    loop.call_later(LEASE_MS / 2000, silence.heard)
    before = now_ms()

    since_ms = await silent_since(host)

    assert since_ms > before
    silence.close()
