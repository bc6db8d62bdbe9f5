"""An answer is made once for all who ask at about the same time."""

import asyncio

import pytest

from psserver.edge.shared_answer import KEPT_S, SharedAnswer


class Source:
    """Makes answers, counts them, and says how late it is."""

    def __init__(self) -> None:
        self.count = 0
        self.now_s = 100.0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def make(self) -> bytes:
        await self.go_on.wait()
        self.count += 1
        return b"%d" % self.count


async def test_who_asks_within_a_second_gets_the_same() -> None:
    source = Source()
    shared = SharedAnswer(source.make, lambda: source.now_s)
    assert [await shared.get() for _ in range(3)] == [b"1"] * 3
    source.now_s += KEPT_S - 0.01
    assert await shared.get() == b"1"
    source.now_s += 0.02
    assert await shared.get() == b"2"


async def test_who_asks_while_it_is_made_waits_for_it() -> None:
    source = Source()
    source.go_on.clear()
    shared = SharedAnswer(source.make, lambda: source.now_s)
    asked = [asyncio.create_task(shared.get()) for _ in range(5)]
    await asyncio.sleep(0)
    source.now_s += 10  # the second begins when it is made
    source.go_on.set()
    assert await asyncio.gather(*asked) == [b"1"] * 5


async def test_what_could_not_be_made_is_tried_again() -> None:
    is_broken = True

    async def make() -> bytes:
        if is_broken:
            raise ValueError("no room")
        return b"made"

    shared = SharedAnswer(make)
    with pytest.raises(ValueError, match="no room"):
        await shared.get()
    is_broken = False
    assert await shared.get() == b"made"
