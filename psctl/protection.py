"""What protects a job that a command starts here: tokens and certificates, made for it.

Processes take what they prove themselves with from their environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from psctl.tokens import create
from pswire.security.credentials import (
    TLS_CA_VARIABLE,
    TLS_CERTIFICATE_VARIABLE,
    TLS_KEY_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
)
from pswire.security.roles import Role
from pswire.security.token_store import TOKENS_VARIABLE

Environment = Mapping[str, str]

UNPROTECTED: Final[dict[str, str]] = dict.fromkeys(
    (
        TOKENS_VARIABLE,
        TOKEN_FILE_VARIABLE,
        TOKEN_VARIABLE,
        TLS_CA_VARIABLE,
        TLS_CERTIFICATE_VARIABLE,
        TLS_KEY_VARIABLE,
    ),
    "",
)
"""Of a job without any: what the caller proves to another job is not for this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """Environments of the processes of a job.

    Attributes:
        daemons: Of the coordinator and the shards.
        workers: Of the workers.
        admin: Of a process that reads, and changes the job.
    """

    daemons: Environment = field(default_factory=UNPROTECTED.copy)
    workers: Environment = field(default_factory=UNPROTECTED.copy)
    admin: Environment = field(default_factory=UNPROTECTED.copy)


def made_protection(folder: Path, *, has_tokens: bool, has_tls: bool) -> Protection:
    """Makes tokens, certificates for 127.0.0.1, or both, in an empty folder.

    Args:
        folder: Where.
        has_tokens: Whether tokens are made, which then say who calls.
        has_tls: Whether certificates are made, which takes the extra `tls`.
    """
    certificates = folder / "certificates"
    if has_tls:
        # Not above: without the extra there is a job with tokens alone.
        from psctl.tls import init, subjects_of

        init(certificates, subjects_of(["127.0.0.1"], []), days=1)
    tokens = folder / "tokens.json"

    def of(role: Role, certificate: str) -> dict[str, str]:
        found = UNPROTECTED.copy()
        if has_tokens:
            token = folder / f"{role}.token"
            create(tokens, role, "", None, token)
            found[TOKEN_FILE_VARIABLE] = str(token)
        if has_tls:
            found |= {
                TLS_CA_VARIABLE: str(certificates / certificate / "ca.pem"),
                TLS_CERTIFICATE_VARIABLE: str(certificates / certificate / "cert.pem"),
                TLS_KEY_VARIABLE: str(certificates / certificate / "key.pem"),
            }
        return found

    asked = {TOKENS_VARIABLE: str(tokens)} if has_tokens else {}
    return Protection(
        daemons={**of(Role.SHARD, "server-127.0.0.1"), **asked},
        workers=of(Role.WORKER, "worker"),
        admin=of(Role.ADMIN, "admin"),
    )
