"""Where the coordinator is and how long to wait: arguments, then environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from psworker.errors import ConfigurationError

COORDINATOR_VARIABLE: Final = "PS_COORDINATOR"
WORKER_ID_VARIABLE: Final = "PS_WORKER_ID"


@dataclass(frozen=True, slots=True)
class HostPort:
    """A TCP address.

    Attributes:
        host: Name or IP address, without brackets.
        port: 1 to 65535.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "HostPort":
        """Reads `HOST:PORT`; an IPv6 address stands in brackets.

        Raises:
            ConfigurationError: It is not of that form.
        """
        host, colon, port_text = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host or "/" in text:
            colon = ""
        if not (host and colon and port_text.isascii() and port_text.isdigit()):
            raise ConfigurationError(
                f"address {text!r} is not HOST:PORT, such as 127.0.0.1:7000 or [::1]:7000"
            )
        port = int(port_text)
        if not 0 < port < 65536:
            raise ConfigurationError(f"port {port} of {text!r} is not in 1 to 65535")
        return cls(host, port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else self.text

    @property
    def text(self) -> str:
        """Without brackets, as only names and IPv4 addresses are written."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one connection.

    Attributes:
        coordinator: Where the coordinator listens.
        worker_id: Wanted id, empty for one of the coordinator's choice.
        connect_timeout_s: Longest wait for the coordinator's first answer.
        step_timeout_s: Longest wait for one step to complete.
        start_timeout_s: Longest wait for the job to start.
    """

    coordinator: HostPort
    worker_id: str = ""
    connect_timeout_s: float = 8.0
    step_timeout_s: float = 600.0
    start_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "step_timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0")


def find_coordinator(
    address: str | None, environ: Mapping[str, str] | None = None
) -> HostPort:
    """The coordinator's address, from the argument or `PS_COORDINATOR`.

    Raises:
        ConfigurationError: There is none, or it is not `HOST:PORT`.
    """
    text = address or (environ or os.environ).get(COORDINATOR_VARIABLE, "")
    if not text:
        raise ConfigurationError(
            "no coordinator is named: pass connect('HOST:PORT'), or set "
            f"{COORDINATOR_VARIABLE}=HOST:PORT, or start the script with `psworker run "
            "--coordinator HOST:PORT -- train.py`; training without a coordinator is "
            "not in this release"
        )
    return HostPort.parse(text)


def find_worker_id(
    worker_id: str | None, environ: Mapping[str, str] | None = None
) -> str:
    """The wanted worker id, from the argument or `PS_WORKER_ID`; empty if none."""
    return worker_id or (environ or os.environ).get(WORKER_ID_VARIABLE, "")
