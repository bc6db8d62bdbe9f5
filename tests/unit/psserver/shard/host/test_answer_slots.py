"""A reader that does not read has few answers under way."""

import asyncio

from psserver.edge.answer_slots import AnswerSlots

TIMEOUT_S = 30.0


def test_each_reader_has_its_own() -> None:
    slots = AnswerSlots(each_max=2)
    with slots.taken("a"):
        assert slots.has_one("a")
        with slots.taken("a"):
            assert not slots.has_one("a")
            assert slots.has_one("b")
            assert slots.count("a") == 2
        assert slots.has_one("a")
    assert slots.count("a") == 0


def test_there_is_a_limit_on_all() -> None:
    slots = AnswerSlots(each_max=2, all_max=3)
    with slots.taken("a"), slots.taken("b"), slots.taken("c"):
        assert not slots.has_one("d")
    assert slots.has_one("d")


async def test_who_waits_gets_one_that_is_given_back() -> None:
    slots = AnswerSlots(each_max=1)
    assert await slots.is_free("a", 0)
    with slots.taken("a"):
        assert not await slots.is_free("a", 0)
        waiting = asyncio.create_task(slots.is_free("a", TIMEOUT_S))
        await asyncio.sleep(0)
    assert await waiting


async def test_of_two_that_wait_one_gets_it() -> None:
    slots = AnswerSlots(each_max=1)
    most = 0

    async def answer() -> None:
        nonlocal most
        assert await slots.is_free("a", TIMEOUT_S)
        with slots.taken("a"):
            most = max(most, slots.count("a"))
            await asyncio.sleep(0)

    await asyncio.gather(*(answer() for _ in range(5)))
    assert most == 1


def test_one_is_given_back_by_an_answer_that_fails() -> None:
    slots = AnswerSlots(each_max=1)
    try:
        with slots.taken("a"):
            raise OSError
    except OSError:
        pass
    assert slots.has_one("a")
