"""Why a coordinator can't be reached, found out with plain sockets.

gRPC reports a refused connection, a dead host and a web server alike as UNAVAILABLE.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from pswire.addresses import Address
from pswire.limits import WAITING_INTERVAL_MS
from pswire.security.certificates import certificates_of
from pswire.security.credentials import Credentials
from pswire.security.tls_problem import handshake_problem
from psworker.errors import ConnectError

_RETRY_INTERVAL_S = 0.1
_ATTEMPT_TIMEOUT_S = 3.0
_AGAIN_TIMEOUT_S = 0.5


class Cause(Enum):
    """Kinds of problems."""

    NAME = auto()
    """The host's name does not resolve, or not in time."""

    REFUSED = auto()
    """The host is there, and nothing listens at the port."""

    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a port could not be reached."""

    cause: Cause
    text: str

    def __str__(self) -> str:
        return self.text


def wait_reachable(
    target: Address,
    timeout_s: float,
    *,
    log: Callable[[str], None] | None = None,
    first_notice_s: float = 2.0,
    is_name_final: bool = False,
    cancelled: threading.Event | None = None,
) -> bool:
    """Returns once the address accepts a TCP connection, or `cancelled` is set.

    Names that do not resolve and refused connections are tried again until then, as
    the coordinator may be just starting.

    Args:
        target: The address.
        timeout_s: Longest wait.
        log: Called with what is waited for, and why, when it takes longer.
        first_notice_s: After which time that is first.
        is_name_final: Whether a name that does not resolve ends the wait.
        cancelled: Ends the wait when it is set.

    Returns:
        Whether anything was logged.

    Raises:
        ConnectError: It does not within `timeout_s`; the text says why.
    """
    cancelled = cancelled or threading.Event()
    began = time.monotonic()
    notice_s = first_notice_s
    left_s = timeout_s
    while problem := problem_reaching(
        target, max(0.05, min(left_s, _ATTEMPT_TIMEOUT_S))
    ):
        if is_name_final and problem.cause is Cause.NAME:
            raise unreachable(target, None, problem.text)
        waited_s = time.monotonic() - began
        if waited_s + _RETRY_INTERVAL_S >= timeout_s:
            raise unreachable(target, timeout_s, problem.text)
        if log is not None and waited_s >= notice_s:
            log(waiting_text(target, problem, waited_s, timeout_s))
            notice_s = waited_s + WAITING_INTERVAL_MS / 1000
        if cancelled.wait(_RETRY_INTERVAL_S):
            break
        left_s = began + timeout_s - time.monotonic()
    return notice_s != first_notice_s


def waiting_text(
    target: Address, problem: Problem, waited_s: float, timeout_s: float
) -> str:
    """The notice of a wait for a coordinator: why, and how long."""
    text = problem.text
    if problem.cause is Cause.REFUSED:
        text = "connection refused (nothing listens there yet)"
    return (
        f"waiting for the coordinator at {target}: {text}; {waited_s:.0f} s so far, at "
        f"most {timeout_s:g} s"
    )


def unreachable(target: Address, timeout_s: float | None, problem: str) -> ConnectError:
    """The error for a coordinator that was not reached, in time or (None) at all."""
    within = "" if timeout_s is None else f" within {timeout_s:g} s"
    return ConnectError(
        f"cannot reach the coordinator at {target}{within}: {problem}",
        facts={"address": str(target)},
    )


def problem_behind_call(target: Address, code: str, text: str) -> str:
    """Why a call failed to a port that accepts connections.

    Args:
        target: Where the call went.
        code: Name of its gRPC status code.
        text: What gRPC says about it.
    """
    if code == "UNIMPLEMENTED":
        return (
            "a gRPC server answers there, but it is not a paramserver coordinator; "
            "correct the address (workers name the coordinator, not a shard)"
        )
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "CANCELLED"):
        still = problem_reaching(target, _AGAIN_TIMEOUT_S)
        if still is not None:
            return still.text
        own = certificates_of(Credentials.from_environment())
        if problem := handshake_problem(target, own, _AGAIN_TIMEOUT_S):
            return problem
        return (
            "something accepts connections there but does not answer as a "
            f"paramserver coordinator ({code.lower().replace('_', ' ')}: {text}): is "
            "it stopped or overloaded, or is it the port of another program?"
        )
    return f"{code.lower().replace('_', ' ')}: {text}"


def problem_reaching(
    target: Address, timeout_s: float = _ATTEMPT_TIMEOUT_S
) -> Problem | None:
    """Connects once, and returns why it did not succeed, None if it did."""
    deadline = time.monotonic() + timeout_s
    addresses = _looked_up(target, timeout_s)
    if isinstance(addresses, Problem):
        return addresses
    problem = None
    for family, _, _, _, address in addresses:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.settimeout(max(0.05, deadline - time.monotonic()))
                probe.connect(address)
            return None
        except ConnectionRefusedError:
            problem = Problem(
                Cause.REFUSED,
                "connection refused - nothing listens there; start `psserver "
                f"coordinator --listen {target} ...` or correct the address",
            )
        except TimeoutError:
            problem = Problem(
                Cause.OTHER,
                "no answer at all - the host is down, or a firewall drops the packets",
            )
        except OSError as error:
            text = f"{error.strerror or error}; check the network and the address"
            problem = Problem(Cause.OTHER, text)
    return problem


def resolved(target: Address, timeout_s: float) -> tuple[str, ...] | Problem:
    """The IP addresses that a name stands for, or why there are none in time."""
    found = _looked_up(target, timeout_s)
    if isinstance(found, Problem):
        return found
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


_Resolved = list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]  # fmt: skip  # noqa: E501


def _looked_up(target: Address, timeout_s: float) -> _Resolved | Problem:
    try:
        return _resolve(target, timeout_s)
    except socket.gaierror as error:
        return Problem(
            Cause.NAME,
            f"the name {target.host!r} does not resolve ({error.strerror}); correct "
            "it, or use an IP address",
        )
    except TimeoutError:
        return Problem(
            Cause.NAME,
            f"the name {target.host!r} does not resolve: the DNS server is silent",
        )


def _resolve(target: Address, timeout_s: float) -> _Resolved:
    """`getaddrinfo` with a deadline, where anybody has to be asked."""
    with suppress(socket.gaierror):
        return _asked(target, socket.AI_NUMERICHOST)
    answers: queue.SimpleQueue[_Resolved | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_asked(target))
        except OSError as error:
            answers.put(error)

    # A daemon: a resolver that hangs must not keep the process from ending.
    threading.Thread(target=ask, name="psworker-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _asked(target: Address, flags: int = 0) -> _Resolved:
    return [
        (family, kind, protocol, name, tuple(address))
        for family, kind, protocol, name, address in socket.getaddrinfo(
            target.host, target.port, type=socket.SOCK_STREAM, flags=flags
        )
    ]
