"""The fault proxy: a wire while nothing is wrong, and each of its faults."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.doubles.fault_proxy import BOTH, DOWN, UP, FaultProxy

SEED: Final = 20261128
TIMEOUT_S: Final = 30.0


@contextmanager
def connected(target: str) -> Iterator[socket.socket]:
    host, port = target.rsplit(":", 1)
    with socket.create_connection((host, int(port)), TIMEOUT_S) as near:
        near.settimeout(TIMEOUT_S)
        yield near


class Peer:
    """A server that hands its connections to the test."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(TIMEOUT_S)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def accept(self) -> socket.socket:
        far, _ = self._listener.accept()
        far.settimeout(TIMEOUT_S)
        return far

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def proxy(peer: Peer) -> Iterator[FaultProxy]:
    with FaultProxy(peer.address) as made:
        yield made


def read_all(source: socket.socket) -> bytes:
    """Bytes up to the end."""
    found = bytearray()
    while data := source.recv(1 << 16):
        found += data
    return bytes(found)


def read(source: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        data = source.recv(count - len(found))
        assert data, f"the end came after {len(found)} of {count} bytes"
        found += data
    return bytes(found)


def is_reset(source: socket.socket) -> bool:
    try:
        return source.recv(1) == b""
    except ConnectionResetError:
        return True


def exchange(address: str, peer: Peer, up: bytes, down: bytes) -> tuple[bytes, bytes]:
    """Sends both ways at once, each side ending its own; what each side got."""
    with connected(address) as near, peer.accept() as far:

        def send(sink: socket.socket, data: bytes) -> None:
            sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

        got: dict[str, bytes] = {}
        threads = [
            threading.Thread(target=send, args=(near, up)),
            threading.Thread(target=send, args=(far, down)),
            threading.Thread(target=lambda: got.update(far=read_all(far))),
        ]
        for thread in threads:
            thread.start()
        got["near"] = read_all(near)
        for thread in threads:
            thread.join()
        return got["far"], got["near"]


@pytest.mark.parametrize("is_direct", [True, False], ids=["wire", "proxy"])
@pytest.mark.parametrize(
    ("up_bytes", "down_bytes"), [(0, 0), (1, 0), (3 << 20, 5 << 20), (0, 1 << 20)]
)
def test_without_a_fault_it_is_a_wire(
    peer: Peer, proxy: FaultProxy, up_bytes: int, down_bytes: int, *, is_direct: bool
) -> None:
    """The same for both: bytes, both directions at once, and each one's end."""
    drawn = random.Random(SEED)
    up, down = drawn.randbytes(up_bytes), drawn.randbytes(down_bytes)
    address = peer.address if is_direct else proxy.address
    assert exchange(address, peer, up, down) == (up, down)


@pytest.mark.parametrize("is_direct", [True, False], ids=["wire", "proxy"])
def test_a_reset_of_one_side_is_one_of_the_other(
    peer: Peer, proxy: FaultProxy, *, is_direct: bool
) -> None:
    address = peer.address if is_direct else proxy.address
    with connected(address) as near, peer.accept() as far:
        near.sendall(b"x")
        assert read(far, 1) == b"x"
        linger = b"\1\0\0\0\0\0\0\0"
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        near.close()
        with pytest.raises(ConnectionResetError):
            far.recv(1)


def test_delays_add_to_the_time_and_not_to_each_other(
    peer: Peer, proxy: FaultProxy
) -> None:
    proxy.slow(delay_s=2.0)
    with connected(proxy.address) as near, peer.accept() as far:
        began = time.monotonic()
        near.sendall(bytes(1 << 20))
        read(far, 1 << 20)
        lasted = time.monotonic() - began
    assert 2 <= lasted < 30  # sixteen pieces one after the other would take 32


def test_a_narrow_link_takes_its_time(peer: Peer, proxy: FaultProxy) -> None:
    proxy.slow(bytes_per_s=10_000, ways=(UP,))
    with connected(proxy.address) as near, peer.accept() as far:
        began = time.monotonic()
        near.sendall(bytes(10_000))
        read(far, 10_000)
        assert time.monotonic() - began >= 0.9
        began = time.monotonic()
        far.sendall(bytes(600_000))
        read(near, 600_000)
        assert time.monotonic() - began < 40  # at that rate it would take 60


def test_a_black_hole_swallows_one_direction_with_its_end(
    peer: Peer, proxy: FaultProxy
) -> None:
    with connected(proxy.address) as near, peer.accept() as far:
        proxy.black_hole((UP,))
        near.sendall(b"lost")
        far.sendall(b"heard")
        assert read(near, 5) == b"heard"
        near.shutdown(socket.SHUT_WR)
        far.settimeout(0.1)
        with pytest.raises(TimeoutError):
            far.recv(1)
        far.settimeout(TIMEOUT_S)
        assert proxy.open_count == 1

        proxy.heal()
        assert is_reset(far)
    with connected(proxy.address) as near, peer.accept() as far:
        near.sendall(b"again")
        assert read(far, 5) == b"again"


def test_a_black_hole_takes_new_connections_too(peer: Peer, proxy: FaultProxy) -> None:
    proxy.black_hole(BOTH)
    with connected(proxy.address) as near, peer.accept() as far:
        near.sendall(b"lost")
        far.sendall(b"lost")
        for each in (near, far):
            each.settimeout(0.05)
            with pytest.raises(TimeoutError):
                each.recv(1)


@pytest.mark.parametrize("way", BOTH)
def test_a_cut_lets_exactly_so_many_bytes_through_and_comes_once(
    peer: Peer, proxy: FaultProxy, way: object
) -> None:
    is_up = way is UP
    proxy.cut_after(100_000, UP if is_up else DOWN)
    with connected(proxy.address) as near, peer.accept() as far:
        source, sink = (near, far) if is_up else (far, near)
        sending = threading.Thread(target=_send_until_broken, args=(source,))
        sending.start()
        assert len(read_all(sink)) == 100_000
        assert is_reset(source)
        sending.join()
    assert proxy.cut_count == 1
    assert exchange(proxy.address, peer, bytes(200_000), b"") == (bytes(200_000), b"")


def _send_until_broken(source: socket.socket) -> None:
    try:
        source.sendall(bytes(10 << 20))
    except (BrokenPipeError, ConnectionResetError):
        return


def test_a_reset_ends_what_is_there_and_welcomes_what_comes(
    peer: Peer, proxy: FaultProxy
) -> None:
    with connected(proxy.address) as near, peer.accept() as far:
        near.sendall(b"x")
        assert read(far, 1) == b"x"
        proxy.reset()
        for each in (near, far):
            with pytest.raises(ConnectionResetError):
                each.recv(1)
    assert exchange(proxy.address, peer, b"up", b"down") == (b"up", b"down")
    assert proxy.connection_count == 2


def test_a_half_closed_connection_goes_on_the_other_way(
    peer: Peer, proxy: FaultProxy
) -> None:
    with connected(proxy.address) as near, peer.accept() as far:
        near.sendall(b"x")
        assert read(far, 1) == b"x"
        proxy.half_close(UP)
        assert far.recv(1) == b""
        far.sendall(b"still")
        assert read(near, 5) == b"still"
        near.sendall(b"goes nowhere, and breaks nothing")
        far.sendall(b"on")
        assert read(near, 2) == b"on"


def test_a_closed_door_opens_again(peer: Peer, proxy: FaultProxy) -> None:
    with connected(proxy.address) as near, peer.accept() as far:
        near.sendall(b"x")
        assert read(far, 1) == b"x"
        proxy.refuse()
        assert is_reset(near)
    with connected(proxy.address) as near:
        assert is_reset(near)
    assert proxy.connection_count == 1

    proxy.heal()
    assert exchange(proxy.address, peer, b"up", b"down") == (b"up", b"down")


def test_nobody_behind_it_is_nobody(proxy: FaultProxy, peer: Peer) -> None:
    peer.close()
    with connected(proxy.address) as near:
        assert is_reset(near)
