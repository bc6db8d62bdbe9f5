"""Work in threads, and its results in the loop."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from psserver.shard.host.chunk_updates import (
    INLINE_BYTES_MAX,
    LONG_BYTES_MIN,
    REPORTED_BYTES_MIN,
    Arithmetic,
)

LARGE = INLINE_BYTES_MAX + 1


@pytest.fixture
async def arithmetic() -> Iterator[Arithmetic]:  # type: ignore[misc]
    made = Arithmetic(1)
    yield made
    made.close()


def unexpected(error: BaseException) -> None:
    raise AssertionError(error)


async def test_small_work_is_done_before_it_returns(arithmetic: Arithmetic) -> None:
    results: list[int] = []

    arithmetic.run(lambda: 7, INLINE_BYTES_MAX, then=results.append, failed=unexpected)

    assert results == [7]


async def test_every_result_is_reported_in_the_loop(arithmetic: Arithmetic) -> None:
    all_there = asyncio.Event()
    results: list[int] = []
    threads: set[str] = set()

    def take(result: int) -> None:
        threads.add(threading.current_thread().name)
        results.append(result)
        if len(results) == 101:
            all_there.set()

    for number in range(101):
        arithmetic.run(lambda n=number: n, LARGE, then=take, failed=unexpected)  # type: ignore[misc]
    await all_there.wait()

    assert results == list(range(101))
    assert threads == {threading.current_thread().name}


async def test_no_result_waits_behind_long_work(arithmetic: Arithmetic) -> None:
    both_are_there, begun, go_on = (
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )
    told: list[str] = []
    all_told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def long() -> None:
        begun.set()
        go_on.wait()

    def take_last(_: None) -> None:
        told.append("long")
        all_told.set_result(None)

    arithmetic.run(
        both_are_there.wait,
        LARGE,
        then=lambda _: told.append("short"),
        failed=unexpected,
    )
    arithmetic.run(long, LONG_BYTES_MIN + 1, then=take_last, failed=unexpected)
    both_are_there.set()
    # What was reported before the long work began is done in the loop by now.
    await asyncio.to_thread(begun.wait)
    told_meanwhile = list(told)
    go_on.set()
    await all_told

    assert told_meanwhile == ["short"]
    assert told == ["short", "long"]


async def test_a_large_result_is_reported_while_more_is_done(
    arithmetic: Arithmetic,
) -> None:
    told = asyncio.Event()
    go_on, both_are_there = threading.Event(), threading.Event()
    second_is_done = asyncio.Event()

    arithmetic.run(
        lambda: both_are_there.wait(30),
        REPORTED_BYTES_MIN,
        then=lambda _: told.set(),
        failed=unexpected,
    )
    arithmetic.run(
        lambda: go_on.wait(30),
        LARGE,
        then=lambda _: second_is_done.set(),
        failed=unexpected,
    )
    both_are_there.set()
    async with asyncio.timeout(30):
        await told.wait()
    assert not second_is_done.is_set()
    go_on.set()
    await second_is_done.wait()


async def test_an_error_of_work_goes_to_whoever_is_told(
    arithmetic: Arithmetic,
) -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    arithmetic.run(lambda: 1 // 0, LARGE, then=print, failed=failed.set_result)

    assert isinstance(await failed, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        await arithmetic.result(lambda: 1 // 0, LARGE)
    assert await arithmetic.result(lambda: 5, LARGE) == 5


@pytest.mark.parametrize("fails", [False, True])
async def test_nobody_is_told_of_work_whose_caller_has_gone(
    arithmetic: Arithmetic, fails: bool
) -> None:
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: errors.append(context)
    )
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()
        if fails:
            raise ZeroDivisionError

    caller = asyncio.ensure_future(arithmetic.result(work, LARGE))
    await asyncio.to_thread(begun.wait)
    caller.cancel()
    await asyncio.wait([caller])
    go_on.set()

    # Told after what came of the first.
    assert await arithmetic.result(lambda: 5, LARGE) == 5
    assert caller.cancelled()
    assert errors == []


async def test_an_error_of_who_is_told_leaves_the_others_alone(
    arithmetic: Arithmetic,
) -> None:
    loop = asyncio.get_running_loop()
    reported: asyncio.Future[object] = loop.create_future()
    loop.set_exception_handler(
        lambda _, context: reported.set_result(context["exception"])
    )
    others: asyncio.Future[int] = loop.create_future()

    def fail(_: int) -> None:
        raise ZeroDivisionError

    arithmetic.run(lambda: 0, LARGE, then=fail, failed=unexpected)
    arithmetic.run(lambda: 5, LARGE, then=others.set_result, failed=unexpected)

    assert await others == 5
    assert isinstance(await reported, ZeroDivisionError)
