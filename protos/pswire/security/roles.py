"""What a process of a job may be, and what it is known as.

Pure.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self
from urllib.parse import quote, unquote

from pswire.names import worker_id_problem

_URI_SCHEME: Final = "paramserver:"


class Role(StrEnum):
    """What somebody may do in a job; `psserver.edge.access` has the calls of each."""

    ADMIN = "admin"
    """Changes the mode, makes checkpoints and returns to them, and reads."""

    SHARD = "shard"
    """Takes the place of a shard."""

    WORKER = "worker"
    """Trains, and reads."""

    READER = "reader"
    """Reads snapshots and the status."""


_ROLES: Final = frozenset(role.value for role in Role)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls, as a token or a certificate says.

    Attributes:
        role: What it may do.
        name: Id of the one worker that it may speak for, empty for any.
        source: What says so, for logs: a token by its id, or a certificate.
    """

    role: Role
    name: str = ""
    source: str = ""

    def __str__(self) -> str:
        who = f"{self.role} {self.name}" if self.name else f"{self.role}"
        return f"{who} ({self.source})" if self.source else who

    @property
    def uri(self) -> str:
        """As a certificate has it among its alternative names."""
        return f"{_URI_SCHEME}{self.role}/{quote(self.name, safe='')}"

    @classmethod
    def from_uri(cls, uri: str, source: str = "") -> Self | None:
        """Reads an alternative name; None for one that names no role."""
        role, slash, name = uri.removeprefix(_URI_SCHEME).partition("/")
        if not (uri.startswith(_URI_SCHEME) and slash and role in _ROLES):
            return None
        try:
            name = unquote(name, errors="strict")
        except UnicodeDecodeError:
            return None
        if name and worker_id_problem(name):
            return None
        return cls(Role(role), name, source)
