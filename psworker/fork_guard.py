"""Keeps forked children, such as a `DataLoader`'s processes, from doing harm.

A child must not crash. gRPC's fork handlers, on by default, start threads in a child:
of 200 children of a connected process 54 to 68 died by SIGSEGV with them and none
without. psworker needs nothing of gRPC in a child, unless that connects by itself:
which children may is decided where the event loop is acquired.
Source: https://github.com/grpc/grpc/issues/32992

It must not keep its parent's connections open. It inherits the sockets, and the
coordinator then notices its parent's end only when the child has ended too (3.7 s late
for a DataLoader). So a child closes its copies at once. It does not shut them down,
which would end the parent's connection.

It must not wait for values that only its parent receives: a step that is under way is
completed before the process forks.
"""

import logging
import multiprocessing
import os
import socket
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    # Not imported: pswire sets the variable below too, and whether somebody else has
    # set it must be seen before.
    from pswire.addresses import Address

logger: Final = logging.getLogger("psworker")

_HANDLERS_VARIABLE: Final = "GRPC_ENABLE_FORK_SUPPORT"
_FD_FOLDER: Final = "/dev/fd"


class Settles(Protocol):
    """What may have a step under way."""

    def settle_before_fork(self) -> None:
        """Completes it."""
        ...


_settling: "weakref.WeakSet[Settles]" = weakref.WeakSet()
_peers: Counter[tuple[str, int]] = Counter()
_is_registered = False
_may_children_crash = False


def disable_grpc_fork_handlers() -> None:
    """Sets gRPC, before it is imported, to do nothing at a fork.

    A user's own setting stays.
    """
    global _may_children_crash
    if _HANDLERS_VARIABLE not in os.environ:
        _may_children_crash = "grpc" in sys.modules
        os.environ[_HANDLERS_VARIABLE] = "0"


def guard(address: "Address") -> None:
    """From now on children close their connections to this address."""
    global _is_registered, _may_children_crash
    if _may_children_crash:
        _may_children_crash = False
        logger.warning(
            "grpc was imported before psworker: processes forked from this one, such "
            "as a DataLoader's workers, may crash; import psworker first, or set %s=0",
            _HANDLERS_VARIABLE,
        )
    _peers.update(_resolved(address))
    if not _is_registered and sys.platform != "win32":
        os.register_at_fork(before=_settle, after_in_child=_close_inherited)
        _is_registered = True


def settle_before_fork(steps: Settles) -> None:
    """From now on, while `steps` is in use, this process forks between its steps."""
    _settling.add(steps)


def is_importing_main() -> bool:
    """Whether a spawned child is just importing its parent's script.

    By the flag for which `multiprocessing` refuses to start a process then.
    """
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def unguard(address: "Address") -> None:
    """Ends one `guard`."""
    _peers.subtract(_resolved(address))


def _resolved(address: "Address") -> set[tuple[str, int]]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return {(str(sockaddr[0]), address.port) for *_, sockaddr in found}


def _settle() -> None:
    for steps in list(_settling):
        steps.settle_before_fork()


def _close_inherited() -> None:
    peers = set(+_peers)
    if not peers:
        return
    for descriptor in _descriptors():
        with suppress(OSError):
            inherited = socket.socket(fileno=descriptor)
            try:
                peer = inherited.getpeername()
            except OSError:
                peer = None
            if isinstance(peer, tuple) and (_plain(peer[0]), peer[1]) in peers:
                inherited.close()
            else:
                inherited.detach()


def _plain(host: object) -> str:
    # gRPC reaches IPv4 addresses through sockets of IPv6 where it can.
    return str(host).removeprefix("::ffff:")


def _descriptors() -> Iterator[int]:
    with suppress(OSError):
        for name in os.listdir(_FD_FOLDER):
            if int(name) > 2:
                yield int(name)
