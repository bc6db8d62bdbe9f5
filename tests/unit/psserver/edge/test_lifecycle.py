"""What a daemon prints, what it tells the service manager, and how it stops."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from psserver.edge.lifecycle import keep_watchdog, notify_systemd, stay

SCRIPT = """
from psserver.edge.lifecycle import print_line
print_line("first")
print_line("second")
"""


def test_a_line_that_nobody_reads_is_no_failure() -> None:
    """As after the kill of the supervisor that had the other end of the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "notify"))
        found.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield found


async def test_the_watchdog_hears_of_a_loop_that_turns_and_of_no_other(
    manager: socket.socket,
) -> None:
    environ = {"WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())}
    watchdog = asyncio.create_task(keep_watchdog(environ))
    for _ in range(3):
        assert await asyncio.to_thread(manager.recv, 100) == b"WATCHDOG=1"
    manager.setblocking(False)
    with suppress(BlockingIOError):  # those sent since, however many
        while manager.recv(100):
            pass
    manager.settimeout(0.05)
    with pytest.raises(TimeoutError):  # the loop does not turn here
        manager.recv(100)
    watchdog.cancel()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "2000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "0"},
    ],
)
async def test_without_a_watchdog_of_its_own_it_says_nothing(
    manager: socket.socket, environ: dict[str, str]
) -> None:
    watchdog = asyncio.create_task(keep_watchdog(environ))
    await asyncio.sleep(0.01)
    manager.settimeout(0)
    with pytest.raises(BlockingIOError):
        manager.recv(100)
    watchdog.cancel()


def test_a_service_manager_that_is_away_ends_no_daemon(
    manager: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    manager.close()
    notify_systemd("READY=1")
    assert "the service manager was not told READY=1" in caplog.text


async def test_what_a_daemon_does_goes_on_while_it_drains(
    manager: socket.socket,
) -> None:
    has_turned, drained = asyncio.Event(), [0]

    async def duty() -> None:
        while True:
            has_turned.set()
            await asyncio.sleep(0)

    async def drain() -> None:
        assert manager.recv(100) == b"STOPPING=1", "before it drains"
        has_turned.clear()
        await has_turned.wait()
        drained[0] += 1

    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(30):
        await stay(duty(), drain=drain)
    assert drained == [1]


async def test_a_duty_that_fails_ends_the_wait_for_a_drain() -> None:
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    is_draining = asyncio.Event()

    async def duty() -> None:
        await is_draining.wait()
        raise RuntimeError("a duty")

    async def drain() -> None:
        is_draining.set()
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="a duty"):
        async with asyncio.timeout(30):
            await stay(duty(), drain=drain)
