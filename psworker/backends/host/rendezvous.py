"""How the processes of a host group find each other, and the sockets between them.

Each listens at an abstract address that follows from the group's name and its number. A
process that enters takes a lock, so that one enters at a time, and connects to all that
are there: both send their memory's descriptor, and the socket stays. The kernel says
whose processes they are, and each proves that it has a secret of the job. Nothing is
left in any file system, however they end.

Any user of the machine may take such an address, and see those that are taken. From one
the others of its group do not follow, if nobody can guess its name.
Source: https://man7.org/linux/man-pages/man7/unix.7.html
"""

import errno
import hmac
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from pswire.object_marks import ObjectMark
from pswire.security.certificates import certificates_of
from pswire.security.credentials import Credentials
from pswire.shared_memory.handshake import address_of, check_peer, peer_of
from pswire.shared_memory.segments import SegmentError, SegmentHeader, SegmentKind
from psworker.backends.host.messages import VALUES, ProcessId, View
from psworker.backends.value_codec import ValueCodec
from psworker.errors import ConfigurationError, StartTimeoutError, UnavailableError
from psworker.launch.launched import PROCESS_COUNT_MAX

logger: Final = logging.getLogger("psworker")

_BACKLOG: Final = 2 * PROCESS_COUNT_MAX
_PACE_S: Final = 0.01
_ANSWER_TIMEOUT_S: Final = 20.0
_READ_BYTES: Final = 256 << 10
_LENGTH: Final = struct.Struct("<I")
_STOPPED: Final = ("T", "t")

_OTHER_NAME: Final = (
    "give the group another PS_HOST_GROUP that nobody can guess, as `psworker run` does"
)

UNPROVEN_TEXT: Final = (
    "shows another token or certificate of the job than this one: give all processes "
    "of a host's group the same (PS_TOKEN_FILE, PS_TOKEN or PS_TLS_KEY)"
)
"""Why a process is refused that has not proved that it is of the job."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of either process, with its memory's descriptor.

    Attributes:
        process: Which process sends it.
        digest: Of what it has prepared, which must be the same in all.
        count: Processes of the group by its variables, which must be the same too: it
            looks for those alone.
        header: Of its memory.
        view: The newest that it knows, if it was there before.
        marks: By which its models and loaders are compared with those of others.
        proof: That it has a secret of the job; see `GroupSecret`.
    """

    process: ProcessId
    digest: str
    count: int
    header: SegmentHeader
    view: View | None = None
    marks: tuple[ObjectMark, ...] = ()
    proof: str = ""


MESSAGES: Final = ValueCodec(Hello, ObjectMark, SegmentHeader, SegmentKind, *VALUES)
"""Of links: values, and nothing that runs where they are read."""


class GroupSecret:
    """What the processes of a group prove to each other that they are of its job by.

    It is the token that this process shows the job, or where it has none the key of
    its certificate: the same for all of a group, which is one worker. Where neither is
    there everybody proves the same.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._first = _secret()

    def proof_of(self, process: ProcessId) -> str:
        """Shows that a process has the secret."""
        return self._proof(_secret(), process)

    def admits(self, hello: Hello) -> bool:
        """Whether a process has proved it: by the secret now, or by that of before."""
        return any(
            hmac.compare_digest(hello.proof, self._proof(each, hello.process))
            for each in (_secret(), self._first)
        )

    def _proof(self, secret: bytes, process: ProcessId) -> str:
        text = f"{self._group}\0{process.number}\0{process.life}"
        return hmac.new(secret, text.encode(), "sha256").hexdigest()


def _secret() -> bytes:
    proof = Credentials.from_environment()
    if proof.token is not None:
        return repr(proof.token.metadata()).encode()
    certificates = certificates_of(proof)
    pair = certificates.current().pair if certificates is not None else None
    return b"" if pair is None else pair[0]


class Link:
    """A socket to one other process. Not blocking.

    Attributes:
        descriptors: Received with messages and not yet taken.
        pid: Of the other process.
        is_over: Whether the other end is closed, or has sent what is no message.
    """

    def __init__(self, peer: socket.socket) -> None:
        """Wraps a connected socket.

        Raises:
            SegmentError: The other process is of another user or PID namespace.
        """
        check_peer(peer)
        self.pid, _ = peer_of(peer)
        if not self.pid:
            raise SegmentError("the other process is in a PID namespace out of sight")
        peer.setblocking(False)
        self.socket = peer
        self.descriptors: deque[int] = deque()
        self.is_over = False
        self._received = bytearray()
        self._unsent = bytearray()
        self._given: list[int] = []

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return bool(self._unsent)

    def send(self, message: object, descriptor: int | None = None) -> None:
        """Sends a message, as far as there is room; see `flush`."""
        data = MESSAGES.encode(message)
        self._unsent += _LENGTH.pack(len(data)) + data
        if descriptor is not None:
            self._given.append(descriptor)
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as there is room."""
        try:
            while self._unsent and not self.is_over:
                if self._given:
                    sent = socket.send_fds(self.socket, [self._unsent], self._given)
                    self._given.clear()
                else:
                    sent = self.socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # what it has sent before is still to be read

    def receive(self) -> Iterator[Any]:
        """Messages that have arrived."""
        while not self.is_over:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self.socket, _READ_BYTES, 4, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.ECONNRESET:
                    continue  # reported once, and what is there is read after it
                self.is_over = True
                break
            self.descriptors.extend(descriptors)
            self._received += data
            self.is_over = not data
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            message = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            try:
                yield MESSAGES.decode(message)
            except ValueError as error:
                logger.warning(
                    "process %d of this machine is left out of the host's group, since "
                    "it sent %s: is it of another release of psworker?",
                    *(self.pid, error),
                )
                self.is_over = True
                self._received.clear()

    def is_stopped(self) -> bool:
        """Whether the other process is stopped, as by SIGSTOP, or has ended."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return True
        return stat.rpartition(")")[2].split()[0] in (*_STOPPED, "Z", "X")

    def close(self) -> None:
        """Ends it."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        self.socket.close()


class Rendezvous:
    """Where a process meets its group, one process at a time.

    Attributes:
        listener: Where later processes connect to this one.
    """

    def __init__(self, group: str, index: int) -> None:
        """Waits for its turn, and listens.

        Raises:
            ConfigurationError: A living process has this number, or another user has
                taken an address of the group.
            StartTimeoutError: Another process does not finish entering.
        """
        self._group = group
        self._index = index
        self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deadline, lock = time.monotonic() + _ANSWER_TIMEOUT_S, _address(group, "lock")
        try:
            if not (is_first := _binds(self._lock, lock)):
                _refuse_foreign(lock)
            while not (is_first or _binds(self._lock, lock)):
                if time.monotonic() >= deadline:
                    _refuse_foreign(lock)
                    raise StartTimeoutError(
                        "another process of this host's group has been entering it "
                        f"for {_ANSWER_TIMEOUT_S:g} s and does not come to an end; "
                        "look whether one of them is stopped. If none is, a process of "
                        f"another user may have taken the group's name: {_OTHER_NAME}"
                    )
                time.sleep(_PACE_S)
            # Only so does the kernel say whose it is.
            self._lock.listen(_BACKLOG)
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            if not _binds(self.listener, _address(group, str(index))):
                self.listener.close()
                _refuse_foreign(_address(group, str(index)))
                raise ConfigurationError(
                    f"a living process is number {index} of this host's group already: "
                    "give each process a PS_LOCAL_RANK of its own, and each group of "
                    "a job on this machine another PS_HOST_GROUP"
                )
        except BaseException:
            self._lock.close()
            raise
        self.listener.setblocking(False)
        self.listener.listen(_BACKLOG)

    def meet(
        self, own: Hello, descriptor: int, count: int, secret: GroupSecret
    ) -> list[tuple[Link, Hello]]:
        """Connects to all processes that are there.

        Args:
            own: Sent to each of them.
            descriptor: Of this process's memory.
            count: Processes that there may be.
            secret: By which each of them proves that it is of the job.

        Raises:
            ConfigurationError: They have prepared something else, or one is not of the
                job.
            StartTimeoutError: One does not answer.
        """
        links: list[Link] = []
        met = []
        try:
            for index in range(max(count, self._index + 1)):
                link = self._connected(index) if index != self._index else None
                if link is None:
                    continue
                links.append(link)
                link.send(own, descriptor)
                answer = self._answer(link, index)
                if answer is None:
                    link.close()
                elif not secret.admits(answer):
                    raise ConfigurationError(
                        f"process {index} of this host's group (PID {link.pid}) "
                        + UNPROVEN_TEXT
                    )
                else:
                    met.append((link, answer))
        except BaseException:
            for link in links:
                link.close()
            raise
        return met

    def close(self) -> None:
        """Lets the next process enter. The listener stays."""
        self._lock.close()

    def _connected(self, index: int) -> Link | None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.connect(_address(self._group, str(index)))
            return Link(peer)
        except OSError:
            peer.close()
            return None
        except SegmentError as error:
            peer.close()
            raise ConfigurationError(
                f"process {index} of this host's group can't share memory with this "
                f"one: {error}; start all of them as one user in one container, or, if "
                f"that one is not yours, {_OTHER_NAME}"
            ) from None

    def _answer(self, link: Link, index: int) -> Hello | None:
        """What a process answers; None if it has ended, or is stopped."""
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            link.flush()
            for message in link.receive():
                if isinstance(message, Hello):
                    return message
                raise ConfigurationError(
                    f"process {index} of this host's group does not take this one: "
                    f"{message}"
                )
            if link.is_over or link.is_stopped():
                return None
            time.sleep(_PACE_S / 10)
        raise UnavailableError(
            f"process {index} of this host's group (PID {link.pid}) did not "
            f"answer within {_ANSWER_TIMEOUT_S:g} s: end it if it hangs"
        )


def group_of(name: str, coordinator: str) -> str:
    """What names a group of one job and user, and nothing else on this machine."""
    text = f"{os.geteuid()}\0{coordinator}\0{name}"
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _address(group: str, part: str) -> bytes:
    """From one that is seen the others must not follow."""
    name = blake2b(f"{group}\0{part}".encode(), digest_size=16).hexdigest()
    return address_of(f"paramserver-host-{name}")


def _refuse_foreign(address: bytes) -> None:
    """Refuses an address that is taken, if it is by a process of another user.

    Raises:
        ConfigurationError: It is.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            _, uid = peer_of(probe)
        except OSError:
            return  # it does not listen yet, is busy, or has ended
    if uid != os.geteuid():
        raise ConfigurationError(
            f"user {uid} of this machine has taken the name of this host's group, so "
            f"that its processes can't meet: {_OTHER_NAME}"
        )


def _binds(made: socket.socket, address: bytes) -> bool:
    try:
        made.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True
