import asyncio

import pytest

from psworker.member.membership import Interruption


class StopError(Exception):
    """What waits are interrupted with here."""


async def test_work_that_nothing_interrupts_gives_its_result() -> None:
    wait = Interruption()

    assert await wait.of(asyncio.sleep(0, "done")) == "done"
    wait.interrupt(StopError())  # too late
    assert await asyncio.sleep(0, "goes on") == "goes on"


async def test_an_interrupted_wait_ends_its_work_and_not_its_task() -> None:
    wait = Interruption()
    has_cleaned_up = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            has_cleaned_up.set()

    asyncio.get_running_loop().call_soon(wait.interrupt, StopError("first"))
    asyncio.get_running_loop().call_soon(wait.interrupt, StopError("second"))
    with pytest.raises(StopError, match="first"):
        await wait.of(work())

    assert has_cleaned_up.is_set()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert await asyncio.sleep(0, "goes on") == "goes on"


async def test_work_may_interrupt_its_own_wait() -> None:
    wait = Interruption()

    async def work() -> None:
        wait.interrupt(StopError())
        raise ValueError("a reason of its own")

    with pytest.raises(StopError):
        await wait.of(work())
    assert await asyncio.sleep(0, "goes on") == "goes on"


async def test_a_task_that_is_cancelled_stays_so() -> None:
    wait = Interruption()
    task = asyncio.create_task(wait.of(asyncio.Event().wait()))
    await asyncio.sleep(0)

    task.cancel()
    wait.interrupt(StopError())

    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("order", ["outer first", "inner first"])
async def test_of_nested_waits_the_outer_one_has_the_last_word(order: str) -> None:
    outer, inner = Interruption(), Interruption()

    async def work() -> None:
        await inner.of(asyncio.Event().wait())

    task = asyncio.create_task(outer.of(work()))
    await asyncio.sleep(0)
    waits = [(outer, "outer"), (inner, "inner")]
    for wait, name in waits if order == "outer first" else reversed(waits):
        wait.interrupt(StopError(name))

    with pytest.raises(StopError, match="outer"):
        await task
