"""Settings of a script: arguments, then variables, then the job's file."""

import math
import os
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pswire import failpoints
from pswire.addresses import PORT_MAX, Address, parse_address
from pswire.channels import check_credentials as check_own
from pswire.config_file import (
    CONFIG_VARIABLE,
    ConfigFileError,
    Setting,
    read_settings,
    variable_of,
)
from pswire.history import HISTORY_VARIABLE
from pswire.limits import WAIT_S_MAX
from pswire.logs import FORMATS
from pswire.names import worker_id_problem
from pswire.number_range import NumberRange
from pswire.security.credentials import CREDENTIAL_VARIABLES, CredentialsError
from pswire.shared_memory.segments import SHARED_MEMORY_VARIABLE, is_wanted
from psworker.errors import ConfigurationError, refuse_worker_id

ADMIN_LISTEN_VARIABLE: Final = "PS_ADMIN_LISTEN"
COORDINATOR_VARIABLE: Final = "PS_COORDINATOR"
WORKER_ID_VARIABLE: Final = "PS_WORKER_ID"

TIMEOUT_S: Final = NumberRange(0.0, WAIT_S_MAX, unit="seconds", is_above=True)
"""Limits of the system's calls end at some hundred years."""


TIMEOUTS_S: Final = {
    "connect_timeout_s": 8.0,
    "step_timeout_s": 600.0,
    "start_timeout_s": 3600.0,
}
"""Where nobody says else."""

RUN_KEYS: Final = frozenset(
    {
        "connect_timeout",
        "gpus",
        "log_dir",
        "max_restarts",
        "nproc",
        "one_push_per_host",
        "progress",
    }
)
"""What `psworker run` alone takes of its section of the job's file."""


def _seconds(setting: Setting) -> str:
    text = setting.text()
    if text != "inf":
        TIMEOUT_S.parsed(text)
    return text


def _address(setting: Setting) -> str:
    return str(parse_address(setting.text()))


def _worker_id(setting: Setting) -> str:
    text = setting.text()
    if problem := worker_id_problem(text):
        raise ValueError(f"the worker id {text[:32]!r} {problem}")
    return text


def _log_format(setting: Setting) -> str:
    text = setting.text()
    if text not in FORMATS:
        raise ValueError(f"{text[:32]!r} is not one of {', '.join(FORMATS)}")
    return text


def _switch(setting: Setting) -> str:
    return "1" if setting.switch() else "0"


CONNECT_KEYS: Final[Mapping[str, Callable[[Setting], str]]] = {
    "admin_listen": Setting.text,
    "connect_timeout_s": _seconds,
    "coordinator": _address,
    "history": Setting.text,
    "log_format": _log_format,
    "shared_memory": _switch,
    "start_timeout_s": _seconds,
    "step_timeout_s": _seconds,
    "tls_ca": Setting.text,
    "tls_cert": Setting.text,
    "tls_key": Setting.text,
    "token_file": Setting.text,
    "worker_id": _worker_id,
}
"""What scripts take of the job's file: each with what reads it."""


def settings(environ: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """The variables; for those that are not set, what the job's file says.

    What the file says of TLS and of the token is put into the environment of this
    process, where every channel looks, unless `environ` stands for it.

    Args:
        environ: In place of the environment of this process.

    Raises:
        ConfigurationError: The file can't be read, or is wrong.
    """
    variables = os.environ if environ is None else environ
    path = variables.get(CONFIG_VARIABLE, "")
    if not path:
        return variables
    try:
        read = read_file(path)
    except ConfigFileError as error:
        raise ConfigurationError(f"{CONFIG_VARIABLE}: {error}") from None
    filed = {variable_of(key): text for key, (text, _) in read.items()}
    given = {name: text for name, text in variables.items() if text}
    if environ is None:
        for name in CREDENTIAL_VARIABLES:
            if name in filed and name not in given:
                os.environ[name] = os.path.abspath(filed[name])
    return ChainMap(given, filed)


def read_file(path: str | os.PathLike[str]) -> dict[str, tuple[str, str]]:
    """What a job's file says to a script: by key the text, and where it stands.

    Raises:
        ConfigFileError: It can't be read, or is wrong.
    """
    known = {"worker": CONNECT_KEYS.keys() | RUN_KEYS}
    found = {}
    for key, setting in read_settings(path, ("job", "worker"), known).items():
        if key not in CONNECT_KEYS:
            continue
        try:
            found[key] = CONNECT_KEYS[key](setting), setting.place
        except ConfigFileError:
            raise
        except ValueError as error:
            raise ConfigFileError(f"{setting.place}: {error}") from None
    return found


def timeout_s(name: str, given: float | None, environ: Mapping[str, str]) -> float:
    """A limit of time: as an argument says, a variable or the file, or by default.

    Args:
        name: Of the argument, as in `step_timeout_s`.
        given: The argument, None if there is none.
        environ: As `settings` returns it.

    Raises:
        ConfigurationError: It is no such time.
    """
    if given is not None:
        check_timeouts(**{name: given})
        return min(given, WAIT_S_MAX)
    text = environ.get(variable_of(name), "")
    if not text:
        return TIMEOUTS_S[name]
    try:
        return WAIT_S_MAX if text == "inf" else TIMEOUT_S.parsed(text)
    except ValueError as error:
        raise ConfigurationError(f"{variable_of(name)}: {error}") from None


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
    connect_timeout_s: float = TIMEOUTS_S["connect_timeout_s"]
    step_timeout_s: float = TIMEOUTS_S["step_timeout_s"]
    start_timeout_s: float = TIMEOUTS_S["start_timeout_s"]
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


def find_admin(given: str | None, environ: Mapping[str, str]) -> Address | None:
    """Where metrics are served, from the argument or `PS_ADMIN_LISTEN`; None: nowhere.

    Of several processes that `psworker run` has started each has a port of its own.

    Raises:
        ConfigurationError: It is no address.
    """
    text = given or environ.get(ADMIN_LISTEN_VARIABLE, "") or "off"
    if text == "off":
        return None
    try:
        address = parse_address(text)
    except ValueError as error:
        raise ConfigurationError(
            f"admin_listen: {error}; give HOST:PORT, or off"
        ) from None
    index = environ.get("PS_LOCAL_RANK", "")
    if not (address.port and index.isdecimal()):
        return address
    return Address(address.host, min(address.port + int(index[:6]), PORT_MAX))


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
