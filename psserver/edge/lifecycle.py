"""What every daemon does: bind, say so, stay until told to stop, drain."""

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING

import grpc.aio

from psserver.config import ConfigurationError, ListenConfig
from psserver.edge.server import server_credentials
from pswire.addresses import Address
from pswire.end_signals import EndWish, Heard
from pswire.security.certificates import certificates_of

if TYPE_CHECKING:
    import grpc_health.v1.health

    from psserver.edge.admin import AdminPort

DRAIN_TIMEOUT_S = 2.0
"""Time for calls to end after SIGTERM; a second signal ends it at once."""

HANDLER_TIMEOUT_S = 0.5
"""Time for handlers to end after their calls have."""

LAST_CHECKPOINT_S = 60.0
"""Longest wait for the last checkpoint, after SIGTERM."""

CERTIFICATES_INTERVAL_S = 60.0
"""Between looks at the files of TLS where nobody connects."""

STOPPING_LINE = "psserver coordinator stops"
"""What a coordinator that makes checkpoints prints when it has made the last one, so
that its supervisor ends the shards, too."""

log = logging.getLogger("psserver")


def bind(server: grpc.aio.Server, listen: ListenConfig) -> Address:
    """Binds a server and returns the address it took.

    Raises:
        ConfigurationError: The port is in use, or the address is not this machine's.
        CredentialsError: The files of TLS can't be used.
    """
    address = listen.address
    _check_free(listen)
    certificates = certificates_of(listen.credentials)
    try:
        if certificates is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(
                str(address),
                server_credentials(
                    certificates, demands_certificates=listen.demands_certificates
                ),
            )
    except RuntimeError as error:
        raise ConfigurationError(
            f"can't listen on {address}: {error}; choose another --listen"
        ) from error
    if listen.missing_protection:
        log.warning(
            "listening on %s WITHOUT %s (--insecure): %s",
            *(address, listen.missing_protection, listen.exposure),
        )
    return Address(address.host, port)


async def watch_certificates(listen: ListenConfig) -> None:
    """Notices new certificates, and those that end soon, though nobody connects."""
    certificates = certificates_of(listen.credentials)
    while certificates is not None:
        await asyncio.sleep(CERTIFICATES_INTERVAL_S)
        certificates.current()
    await asyncio.Event().wait()  # as long as the daemon serves


def _check_free(listen: ListenConfig) -> None:
    """Says in words why an address can't be bound; gRPC's text does not."""
    address = listen.address
    if address.port == 0:
        return
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As gRPC binds: a port in TIME_WAIT is free, one with a listener is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise bind_problem(error, listen) from error


def bind_problem(error: OSError, listen: ListenConfig) -> ConfigurationError:
    """Why an address can't be bound, in words."""
    address, option = listen.address, listen.option
    if error.errno == errno.EADDRINUSE:
        why = (
            f"port {address.port} is in use by another process; stop it, or choose "
            f"another {option} (port 0 takes a free one)"
        )
    else:
        why = f"{error.strerror}; choose another {option}"
    return ConfigurationError(f"can't listen on {address}: {why}")


def announce(role: str, address: Address) -> None:
    """Prints the one line that says where a daemon listens, and notifies systemd."""
    print_line(f"psserver {role} listening on {address}")
    notify_systemd("READY=1")


def print_line(line: str) -> None:
    """Prints a line for whoever reads what a daemon prints, if somebody still does.

    A supervisor that was killed leaves a pipe that nobody reads.
    """
    try:
        print(line, flush=True)
    except OSError as error:
        log.info("%r is printed for nobody: %s", line, error)
        # The line is still in the buffer, whose flush at exit would fail again.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def notify_systemd(state: str) -> None:
    """Sends one datagram to the service manager, if there is one that takes it now.

    Never waits for it, and outlives it: a manager may be starting again.
    Source: sd_notify(3).
    """
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    target = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(state.encode(), socket.MSG_DONTWAIT, target)
        except OSError as error:
            log.warning("the service manager was not told %s: %s", state, error)


async def stay(
    *duties: Coroutine[None, None, None],
    drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Runs until SIGTERM or SIGINT, or until one of the duties ends.

    Args:
        duties: What runs meanwhile, and goes on while the daemon drains.
        drain: What a signal lets begin, and waits for; a second signal does not.

    Raises:
        Whatever a duty raised.
    """
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    wish = EndWish()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _hear, wish, told, number)

    async def until_drained() -> None:
        await told.wait()
        notify_systemd("STOPPING=1")
        if drain is not None:
            await drain()

    running = (*duties, keep_watchdog(), until_drained())
    tasks = [asyncio.create_task(each) for each in running]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def keep_watchdog(environ: Mapping[str, str] = os.environ) -> None:
    """Tells the service manager that the event loop turns, as often as it asks for.

    A loop that is stuck sends nothing, and the manager starts the daemon again.
    Source: sd_watchdog_enabled(3), which asks for half of the time.
    """
    limit_us = environ.get("WATCHDOG_USEC", "")
    process_id = environ.get("WATCHDOG_PID", "")
    is_ours = process_id in ("", str(os.getpid()))
    if is_ours and limit_us.isdecimal() and int(limit_us):
        while True:
            notify_systemd("WATCHDOG=1")
            await asyncio.sleep(int(limit_us) / 2e6)
    await asyncio.Event().wait()  # as long as the daemon serves


async def refuse_readiness(
    health: "grpc_health.v1.health.aio.HealthServicer", admin: "AdminPort | None"
) -> None:
    """Says from now on, to whoever asks, that the daemon is not ready."""
    if admin is not None:
        admin.drain()
    await health.enter_graceful_shutdown()


async def stop(server: grpc.aio.Server) -> None:
    """Ends a server's calls, then waits for their handlers.

    `stop` itself returns while handlers of aborted calls still run (grpc/grpc#37239);
    the end of the event loop would cancel them, each with a traceback in the log.
    """
    await server.stop(DRAIN_TIMEOUT_S)
    handlers = asyncio.all_tasks() - {asyncio.current_task()}
    if handlers:
        await asyncio.wait(handlers, timeout=HANDLER_TIMEOUT_S)


def _hear(wish: EndWish, told: asyncio.Event, number: signal.Signals) -> None:
    heard = wish.hear()
    if heard is Heard.AGAIN:
        os._exit(128 + number)
    if heard is Heard.FIRST:
        log.info("%s: draining; a second one stops at once", number.name)
        told.set()
