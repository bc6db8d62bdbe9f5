"""Work in threads beside the event loop, and what it takes of the processors."""

import os
import sys

import pytest

from psserver.edge.file_calls import in_thread


def niceness() -> int:
    """Of the thread that asks."""
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities there")
async def test_what_is_done_in_the_background_leaves_training_the_processors() -> None:
    before = niceness()
    assert await in_thread(niceness) == before
    assert await in_thread(niceness, is_background=True) == min(19, before + 10)
    assert niceness() == before


async def test_an_error_of_the_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0, is_background=True)
