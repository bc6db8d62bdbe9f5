"""How a worker and a shard hand segments to each other, over a Unix socket.

Three packets on a `SOCK_SEQPACKET` socket of an abstract name, which the shard has sent
over gRPC: the worker's offer with its token and its gradient segment, the shard's
answer with its segment of values, or why not, and the worker's word that it can read
it. What crosses the socket proves what the rest relies on: the kernel says whose
processes these are, and a segment that begins as announced is memory that both read.

Blocking; packets are small, and each side has a time-out.
Source: https://man7.org/linux/man-pages/man7/unix.7.html
"""

import array
import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

from pswire.shared_memory.segments import SegmentError, SegmentHeader, SegmentKind

TOKEN_BYTES: Final = 16

HANDSHAKE_TIMEOUT_S: Final = 5.0
"""For each packet. Both sides answer within a millisecond."""

ACKNOWLEDGEMENT: Final = b"mapped"

_PACKET_BYTES_MAX: Final = 1024
_OFFER: Final = struct.Struct(f"<{TOKEN_BYTES}sQQ")
_ANSWER: Final = struct.Struct("<BQQ")
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class Offer:
    """What the worker sends.

    Attributes:
        token: As the shard has sent it.
        header: Of the gradient segment.
        descriptor: Of the gradient segment. Whoever has it closes it.
    """

    token: bytes
    header: SegmentHeader
    descriptor: int

    def send(self, peer: socket.socket) -> None:
        """Sends it."""
        header = self.header
        data = _OFFER.pack(self.token, header.number, header.byte_count)
        socket.send_fds(peer, [data], [self.descriptor])

    @classmethod
    def receive(cls, peer: socket.socket) -> "Offer":
        """Receives one.

        Raises:
            SegmentError: It is malformed.
        """
        data, descriptor = _receive(peer)
        if descriptor is None or len(data) != _OFFER.size:
            _close(descriptor)
            raise SegmentError(f"an offer of {len(data)} bytes is malformed")
        token, number, byte_count = _OFFER.unpack(data)
        return cls(
            token, SegmentHeader(SegmentKind.GRADIENT, number, byte_count), descriptor
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What the shard sends when it takes an offer.

    Attributes:
        header: Of the segment of values.
        descriptor: Of the segment of values. Whoever has received it closes it.
    """

    header: SegmentHeader
    descriptor: int

    def send(self, peer: socket.socket) -> None:
        """Sends it."""
        header = self.header
        data = _ANSWER.pack(1, header.number, header.byte_count)
        socket.send_fds(peer, [data], [self.descriptor])

    @classmethod
    def receive(cls, peer: socket.socket) -> "Answer":
        """Receives one.

        Raises:
            SegmentError: The shard has refused, or it is malformed.
        """
        data, descriptor = _receive(peer)
        if data[:1] == b"\0":
            _close(descriptor)
            raise SegmentError(f"the shard says: {data[1:].decode(errors='replace')}")
        if descriptor is None or len(data) != _ANSWER.size:
            _close(descriptor)
            raise SegmentError("the shard has closed the socket without an answer")
        _, number, byte_count = _ANSWER.unpack(data)
        return cls(SegmentHeader(SegmentKind.VALUES, number, byte_count), descriptor)


def send_refusal(peer: socket.socket, why: str) -> None:
    """Answers an offer that is not taken."""
    peer.send(b"\0" + why.encode()[: _PACKET_BYTES_MAX - 1])


def address_of(name: str) -> bytes:
    """The abstract address of a socket's name."""
    return b"\0" + name.encode()


def peer_of(peer: socket.socket) -> tuple[int, int]:
    """PID and user of the process at the other end, as the kernel says."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def check_peer(peer: socket.socket) -> None:
    """Checks that the other end is a process of the same user.

    Raises:
        SegmentError: It is not.
    """
    _, uid = peer_of(peer)
    if uid != os.geteuid():
        raise SegmentError(
            f"the other process is of user {uid}, this one of user {os.geteuid()}"
        )


def _receive(peer: socket.socket) -> tuple[bytes, int | None]:
    """A packet, and the descriptor that came with it."""
    # One descriptor at most: the kernel closes any that find no room.
    room = socket.CMSG_LEN(array.array("i").itemsize)
    data, ancillary, _, _ = peer.recvmsg(
        _PACKET_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // 4 * 4])
    for extra in descriptors[1:]:
        os.close(extra)
    return data, descriptors[0] if descriptors else None


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
