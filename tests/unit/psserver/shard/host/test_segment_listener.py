"""Who is accepted at the socket for segments, and what others cost."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from psserver.logs import REFUSAL_LINES_MAX
from psserver.shard.host import shared_segments
from psserver.shard.host.hosted_members import HostedMembers
from psserver.shard.host.shared_segments import SegmentListener, SharedSegments
from pswire.shared_memory.handshake import Answer, address_of
from pswire.shared_memory.segments import SegmentError, boot_id

pytestmark = pytest.mark.skipif(not boot_id(), reason="Linux only")

TIMEOUT_S = 30.0


@asynccontextmanager
async def listening() -> AsyncIterator[SharedSegments]:
    segments = SharedSegments(HostedMembers(), is_wanted=True)
    listener = SegmentListener(segments, lambda: None)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield segments
    finally:
        listener.close()


def connected(segments: SharedSegments) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(address_of(segments.socket_name))
    return peer


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110, what the loop does is what is looked at
        await asyncio.sleep(0)


async def test_another_user_takes_no_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told so and closed as it is accepted; the log has a few lines of many."""
    mine = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: mine + 1)

    caplog.set_level(logging.WARNING, "psserver.shard")
    async with listening() as segments:
        before = descriptors()
        for _ in range(3 * REFUSAL_LINES_MAX):
            with connected(segments) as peer:
                peer.setblocking(False)
                loop = asyncio.get_running_loop()
                is_readable = asyncio.Event()
                loop.add_reader(peer, is_readable.set)
                await is_readable.wait()
                loop.remove_reader(peer)
                with pytest.raises(SegmentError, match=f"of user {mine}"):
                    Answer.receive(peer)
                assert peer.recv(1) == b""  # closed, without a packet of its own
        assert descriptors() <= before
    assert len(caplog.records) == REFUSAL_LINES_MAX


async def test_without_descriptors_the_loop_is_not_kept_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who connects meanwhile is accepted when there are some again."""
    monkeypatch.setattr(shared_segments, "_PAUSE_S", 0.05)
    tries: list[float] = []
    accept = socket.socket.accept

    def accepting(
        self: socket.socket,
    ) -> tuple[socket.socket, object]:
        tries.append(asyncio.get_running_loop().time())
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accepting)

    async with listening() as segments:
        with connected(segments):
            await until(lambda: len(tries) == 3)
    first, second, third = tries
    assert min(second - first, third - second) >= 0.04


async def test_connections_at_a_time_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One more waits until one of them is closed."""
    monkeypatch.setattr(shared_segments, "_HANDOVER_COUNT_MAX", 2)
    tries: list[None] = []
    accept = socket.socket.accept

    def accepting(self: socket.socket) -> tuple[socket.socket, object]:
        tries.append(None)
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accepting)

    async with listening() as segments:
        peers = [connected(segments) for _ in range(4)]
        await until(lambda: len(tries) == 2)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(tries) == 2
        peers[0].close()
        await until(lambda: len(tries) == 3)
        for peer in peers:
            peer.close()
