"""Waits until something listens where the coordinator should be.

A worker may be started before its coordinator. Whoever waits hears within a second
what for, and again every few seconds.
"""

import socket
import threading
import time
from collections.abc import Callable

from pswire.addresses import Address

ATTEMPT_INTERVAL_S = 0.25
ATTEMPT_TIMEOUT_S = 3.0
FIRST_NOTICE_S = 0.5
NOTICE_INTERVAL_S = 5.0


class CoordinatorUnreachableError(Exception):
    """Nothing to wait for, or waited long enough. The text says what to do."""


def wait_for_coordinator_port(
    address: Address,
    *,
    timeout_s: float,
    log: Callable[[str], None],
    cancelled: threading.Event,
) -> None:
    """Returns once `address` accepts a connection, or `cancelled` is set.

    Raises:
        CoordinatorUnreachableError: The host's name does not resolve, or `timeout_s`
            have passed.
    """
    began = time.monotonic()
    next_notice_s = FIRST_NOTICE_S
    while (trouble := _trouble_reaching(address)) is not None:
        waited_s = time.monotonic() - began
        if waited_s >= timeout_s:
            raise CoordinatorUnreachableError(
                f"gave up on the coordinator at {address} after {waited_s:.0f} s: "
                f"{trouble}. Is `psserver coordinator --listen {address}` running? "
                "A longer --connect-timeout waits longer"
            )
        if waited_s >= next_notice_s:
            log(f"waiting for the coordinator at {address}: {trouble}")
            next_notice_s = waited_s + NOTICE_INTERVAL_S
        if cancelled.wait(ATTEMPT_INTERVAL_S):
            return
    if next_notice_s != FIRST_NOTICE_S:
        log(f"the coordinator at {address} is there")


def _trouble_reaching(address: Address) -> str | None:
    """What keeps a connection from being made. None if it was made."""
    try:
        connection = socket.create_connection(
            (address.host, address.port), timeout=ATTEMPT_TIMEOUT_S
        )
    except socket.gaierror as error:
        raise CoordinatorUnreachableError(
            f"the coordinator's host {address.host!r} can't be found: "
            f"{error.strerror}. Check the spelling in --coordinator"
        ) from error
    except ConnectionRefusedError:
        return "connection refused (nothing listens there yet)"
    except TimeoutError:
        return (
            f"no answer in {ATTEMPT_TIMEOUT_S:.0f} s "
            "(the host is down, or a firewall drops the port)"
        )
    except OSError as error:
        return error.strerror or str(error)
    connection.close()
    return None
