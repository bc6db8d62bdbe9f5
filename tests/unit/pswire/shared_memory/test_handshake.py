"""Packets by which segments are handed over."""

import os
import socket
from collections.abc import Iterator

import pytest

from pswire.shared_memory.handshake import (
    TOKEN_BYTES,
    Answer,
    Offer,
    check_peer,
    send_refusal,
)
from pswire.shared_memory.segments import (
    MemorySegment,
    SegmentError,
    SegmentHeader,
    SegmentKind,
    boot_id,
)

pytestmark = pytest.mark.skipif(not boot_id(), reason="Linux only")

TOKEN = bytes(range(TOKEN_BYTES))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second:
        yield first, second


Pair = tuple[socket.socket, socket.socket]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_an_offer_and_its_answer_arrive_with_their_memory(pair: Pair) -> None:
    gradient = MemorySegment.create(SegmentKind.GRADIENT, 4096)
    values = MemorySegment.create(SegmentKind.VALUES, 8192)
    gradient.data[1000:1004] = b"grad"

    Offer(TOKEN, gradient.header, gradient.descriptor).send(pair[0])
    offer = Offer.receive(pair[1])
    Answer(values.header, values.descriptor).send(pair[1])
    answer = Answer.receive(pair[0])

    assert (offer.token, offer.header) == (TOKEN, gradient.header)
    adopted = MemorySegment.adopt(offer.header, offer.descriptor)
    assert bytes(adopted.data[1000:1004]) == b"grad"
    assert answer.header == values.header
    MemorySegment.adopt(answer.header, answer.descriptor)


def test_a_refusal_says_why(pair: Pair) -> None:
    send_refusal(pair[1], "this token was not told")

    with pytest.raises(SegmentError, match="the shard says: this token was not told"):
        Answer.receive(pair[0])


def test_a_socket_that_closes_is_an_error(pair: Pair) -> None:
    pair[1].close()

    with pytest.raises(SegmentError, match="closed the socket without an answer"):
        Answer.receive(pair[0])


@pytest.mark.parametrize("data", [b"short", bytes(1000)])
def test_malformed_offers_leave_no_descriptor_open(pair: Pair, data: bytes) -> None:
    reader, writer = os.pipe()
    socket.send_fds(pair[0], [data], [reader, writer])
    before = descriptors()

    with pytest.raises(SegmentError, match=r"an offer of \d+ bytes is malformed"):
        Offer.receive(pair[1])

    assert descriptors() <= before
    os.close(reader)
    os.close(writer)


def test_an_offer_without_memory_is_malformed(pair: Pair) -> None:
    header = SegmentHeader(SegmentKind.GRADIENT, 1, 4096)
    reader, writer = os.pipe()
    Offer(TOKEN, header, reader).send(pair[0])
    os.close(Offer.receive(pair[1]).descriptor)
    pair[0].send(TOKEN + bytes(16))

    with pytest.raises(SegmentError, match="an offer of 32 bytes is malformed"):
        Offer.receive(pair[1])
    os.close(reader)
    os.close(writer)


def test_a_process_of_another_user_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_peer(pair[0])
    mine = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: mine + 1)

    with pytest.raises(
        SegmentError,
        match=f"the other process is of user {mine}, this one of user {mine + 1}",
    ):
        check_peer(pair[0])
