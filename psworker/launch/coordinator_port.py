"""Waits until something listens where the coordinator should be.

A worker may be started before its coordinator. Whoever waits hears within a second
what for, and again every few seconds.
"""

import threading
import time
from collections.abc import Callable

from pswire.addresses import Address
from psworker.launch.reachability import (
    Cause,
    problem_reaching,
    unreachable,
    waiting_text,
)

ATTEMPT_INTERVAL_S = 0.25
FIRST_NOTICE_S = 0.5
NOTICE_INTERVAL_S = 5.0


def wait_for_coordinator_port(
    address: Address,
    *,
    timeout_s: float,
    log: Callable[[str], None],
    cancelled: threading.Event,
) -> None:
    """Returns once `address` accepts a connection, or `cancelled` is set.

    Raises:
        ConnectError: The host's name does not resolve, or `timeout_s` have passed.
    """
    began = time.monotonic()
    next_notice_s = FIRST_NOTICE_S
    while (problem := problem_reaching(address)) is not None:
        waited_s = time.monotonic() - began
        if problem.cause is Cause.NAME:
            raise unreachable(address, None, problem.text)
        if waited_s >= timeout_s:
            raise unreachable(address, timeout_s, problem.text)
        if waited_s >= next_notice_s:
            log(waiting_text(address, problem, waited_s, timeout_s))
            next_notice_s = waited_s + NOTICE_INTERVAL_S
        if cancelled.wait(ATTEMPT_INTERVAL_S):
            return
    if next_notice_s != FIRST_NOTICE_S:
        log(f"the coordinator at {address} is there")
