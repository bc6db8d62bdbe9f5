"""Shards that are served without a network."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.doubles.served_shard import ServedShard

Make = Callable[..., ServedShard]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes shards, which must be made in the event loop."""
    made: list[ServedShard] = []

    def make(**settings: Any) -> ServedShard:  # noqa: ANN401, as the job has them
        made.append(ServedShard(**settings))
        return made[-1]

    yield make
    for shard in made:
        shard.host.close()
