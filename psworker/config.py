"""Where the coordinator is and how long to wait: arguments, then environment."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pswire import failpoints
from pswire.addresses import Address, parse_address
from pswire.channels import check_credentials as check_own
from pswire.history import HISTORY_VARIABLE
from pswire.limits import WAIT_S_MAX
from pswire.number_range import NumberRange
from pswire.security.credentials import CredentialsError
from pswire.shared_memory.segments import SHARED_MEMORY_VARIABLE, is_wanted
from psworker.errors import ConfigurationError, refuse_worker_id

COORDINATOR_VARIABLE: Final = "PS_COORDINATOR"
WORKER_ID_VARIABLE: Final = "PS_WORKER_ID"

TIMEOUT_S: Final = NumberRange(0.0, WAIT_S_MAX, unit="seconds", is_above=True)
"""Limits of the system's calls end at some hundred years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one connection.

    Attributes:
        coordinator: Where the coordinator listens.
        worker_id: Wanted id, empty for one of the coordinator's choice.
        connect_timeout_s: Longest wait for the coordinator's first answer.
        step_timeout_s: Longest wait for one step to complete.
        start_timeout_s: Longest wait for the job to start.
        history: Where each start of this worker writes its history, see
            `pswire.history`; empty for none.
        shares_memory: Whether tensors go through memory that is shared with shards on
            this machine.
    """

    coordinator: Address
    worker_id: str = ""
    connect_timeout_s: float = 8.0
    step_timeout_s: float = 600.0
    start_timeout_s: float = 3600.0
    history: str = ""
    shares_memory: bool = True

    def __post_init__(self) -> None:
        if self.worker_id:
            refuse_worker_id(
                self.worker_id,
                f"give another one, by connect(worker_id=...) or {WORKER_ID_VARIABLE}",
            )
        check_timeouts(
            connect_timeout_s=self.connect_timeout_s,
            step_timeout_s=self.step_timeout_s,
            start_timeout_s=self.start_timeout_s,
        )


def check_timeouts(**seconds_by_name: float) -> None:
    """Checks the limits of time that a user sets.

    Infinity is one: it stands for the longest.

    Raises:
        ConfigurationError: One is no such time.
    """
    for name, seconds in seconds_by_name.items():
        problem = TIMEOUT_S.problem(seconds)
        if problem and seconds != math.inf:
            raise ConfigurationError(f"connect({name}=...): {problem}")


def find_coordinator(
    address: str | None, environ: Mapping[str, str] | None = None
) -> Address:
    """The coordinator's address, from the argument or `PS_COORDINATOR`.

    Raises:
        ConfigurationError: There is none, or it is not `HOST:PORT`.
    """
    found = named_coordinator(address, environ)
    if found is None:
        raise ConfigurationError(
            "no coordinator is named: pass its address 'HOST:PORT', or set "
            f"{COORDINATOR_VARIABLE}=HOST:PORT"
        )
    return found


def named_coordinator(
    address: str | None, environ: Mapping[str, str] | None = None
) -> Address | None:
    """The coordinator's address as `find_coordinator`, `None` if nobody names one.

    Raises:
        ConfigurationError: It is not `HOST:PORT`.
    """
    text = address or (environ or os.environ).get(COORDINATOR_VARIABLE, "")
    if not text:
        return None
    place = "" if address else f"{COORDINATOR_VARIABLE}: "
    try:
        found = parse_address(text)
    except ValueError as error:
        raise ConfigurationError(f"{place}{error}") from None
    if found.port == 0:
        raise ConfigurationError(f"{place}{text!r} names no port that can be called")
    return found


def find_history(environ: Mapping[str, str] | None = None) -> str:
    """Where this worker's history goes, from `PS_HISTORY`; empty for nowhere."""
    return (environ or os.environ).get(HISTORY_VARIABLE, "")


def shares_memory(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `PS_SHARED_MEMORY` leaves shared memory on."""
    return is_wanted((environ or os.environ).get(SHARED_MEMORY_VARIABLE, "1"))


def check_credentials() -> None:
    """Checks what this process proves itself with, before anything is called.

    Raises:
        ConfigurationError: It can't be used; the text says why.
    """
    try:
        check_own()
    except CredentialsError as error:
        raise ConfigurationError(str(error)) from None


def arm_failpoints(environ: Mapping[str, str] | None = None) -> None:
    """Arms what `PS_FAILPOINT` says, once for a process.

    Raises:
        ConfigurationError: It can't be understood.
    """
    try:
        failpoints.arm(environ)
    except failpoints.FailpointError as error:
        raise ConfigurationError(str(error)) from None
