"""A gRPC client in bytes, which does what gRPC's own client never would.

It grants no more than HTTP/2's first window, and writes headers without compression.
Sources: RFC 9113 and RFC 7541.
"""

import socket
import ssl
import struct
from collections.abc import Mapping
from typing import Final, Self
from urllib.parse import unquote

import grpc

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
TIMEOUT_S: Final = 30.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    head = struct.pack(">I", len(payload))[1:] + bytes((kind, flags))
    return head + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header without indexing or Huffman's code."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: str) -> bytes:
    data = text.encode()
    length = len(data)
    if length < 0x7F:
        return bytes((length,)) + data
    rest, prefix = length - 0x7F, bytearray((0x7F,))
    while rest >= 0x80:
        prefix.append(rest & 0x7F | 0x80)
        rest >>= 7
    prefix.append(rest)
    return bytes(prefix) + data


def request_headers(path: str, **others: str) -> bytes:
    """The headers of a gRPC call."""
    known = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "test",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(literal(*each) for each in {**known, **others}.items())


def message(data: bytes, *, compressed: int = 0) -> bytes:
    """A gRPC message with its prefix."""
    return bytes((compressed,)) + struct.pack(">I", len(data)) + data


class Http2Client:
    """One connection, spoken to in frames. A context manager."""

    def __init__(
        self,
        address: str,
        *,
        speaks: bool = True,
        tls: ssl.SSLContext | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Connects.

        Args:
            address: `HOST:PORT`.
            speaks: Whether it says that it speaks HTTP/2.
            tls: For one that talks by TLS.
            headers: Of each call.

        Raises:
            ssl.SSLError: There is no TLS there.
        """
        host, _, port = address.rpartition(":")
        self._headers = headers or {}
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        if tls is not None:
            self.socket = _secured(self.socket, tls, host)
        self._received = b""
        self._stream = -1
        if speaks:
            self.raw(PREFACE + frame(SETTINGS, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def raw(self, data: bytes) -> None:
        """Sends bytes."""
        self.socket.sendall(data)

    def fields(self, path: str, **others: str) -> bytes:
        """The headers of a call."""
        return request_headers(path, **{**self._headers, **others})

    def begin(self, path: str, **headers: str) -> int:
        """Begins a call; its stream."""
        self._stream += 2
        fields = self.fields(path, **headers)
        self.raw(frame(HEADERS, END_HEADERS, self._stream, fields))
        return self._stream

    def follow(self, stream: int) -> int:
        """Says which stream is the newest call's, after frames of its own."""
        self._stream = stream
        return stream

    def send(self, data: bytes, *, ends: bool = False) -> None:
        """Sends data of the newest call."""
        self.raw(frame(DATA, END_STREAM if ends else 0, self._stream, data))

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """The next frames that come: kind, flags, stream and payload; none at the end.

        Raises:
            TimeoutError: Nothing came.
        """
        while len(self._received) < 9:
            if not self._receive():
                return []
        length = int.from_bytes(self._received[:3])
        while len(self._received) < 9 + length:
            if not self._receive():
                return []
        head, self._received = self._received[:9], self._received[9:]
        payload, self._received = self._received[:length], self._received[length:]
        stream = int.from_bytes(head[5:]) & 0x7FFFFFFF
        return [(head[3], head[4], stream, payload)]

    def status(self) -> tuple[int, str]:
        """Status and text of the newest call, once it has ended."""
        while found := self.frames():
            for kind, flags, stream, payload in found:
                if kind == SETTINGS and not flags & ACK:
                    self.raw(frame(SETTINGS, ACK, 0))
                elif kind == PING and not flags & ACK:
                    self.raw(frame(PING, ACK, 0, payload))
                elif stream == self._stream and kind == HEADERS and flags & END_STREAM:
                    return _status_in(payload)
                elif stream == self._stream and kind == RST_STREAM:
                    return grpc.StatusCode.CANCELLED.value[0], "reset"
        return grpc.StatusCode.UNAVAILABLE.value[0], "the connection has ended"

    def is_ended(self) -> bool:
        """Reads to the end. False if nothing comes for long."""
        try:
            while self._receive():
                self._received = b""
        except TimeoutError:
            return False
        return True

    def _receive(self) -> bool:
        try:
            data = self.socket.recv(1 << 16)
        except (ConnectionError, ssl.SSLError):
            return False
        self._received += data
        return bool(data)


def _secured(plain: socket.socket, tls: ssl.SSLContext, host: str) -> socket.socket:
    try:
        return tls.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise


def _status_in(headers: bytes) -> tuple[int, str]:
    """Reads the status of trailers, which gRPC writes as literals."""
    found = {}
    for name in (b"grpc-status", b"grpc-message"):
        place = headers.find(name)
        if place >= 0:
            start = place + len(name)
            length, start = _length_at(headers, start)
            found[name] = headers[start : start + length].decode()
    return int(found[b"grpc-status"]), unquote(found.get(b"grpc-message", ""))


def _length_at(data: bytes, place: int) -> tuple[int, int]:
    length = data[place] & 0x7F
    place += 1
    if length == 0x7F:
        shift = 0
        while True:
            byte = data[place]
            place += 1
            length += (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
    return length, place
