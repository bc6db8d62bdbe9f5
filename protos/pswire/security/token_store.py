"""The file by which daemons know tokens: a digest and what it stands for, each.

`psctl token` writes it, whole each time; a daemon reads it anew when it has changed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from pswire.checkpoint.errors import UNREADABLE, CheckpointError
from pswire.checkpoint.json_shape import fields, one_of, optional, rows, text
from pswire.names import printable, worker_id_problem
from pswire.security.credentials import CredentialsError, read_credential
from pswire.security.roles import Identity, Role
from pswire.security.tokens import digest_of

TOKENS_VARIABLE: Final = "PS_TOKENS"

_VERSION: Final = 1
_SHAPE: Final = fields(
    {
        "version": one_of((_VERSION,)),
        "tokens": rows(
            fields(
                {
                    "id": text,
                    "role": text,
                    "worker_id": optional(text),
                    "sha256": text,
                    "created": text,
                    "expires": optional(text),
                }
            )
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry:
    """A token that daemons know.

    Attributes:
        token_id: Names it where it is listed, revoked or logged.
        identity: Whom it stands for.
        digest: SHA-256 of it.
        created: When it was made.
        expires: From when on it counts no more, None for never.
    """

    token_id: str
    identity: Identity
    digest: bytes
    created: datetime
    expires: datetime | None = None

    def is_valid(self, now: datetime) -> bool:
        """Whether it counts at a time."""
        return self.expires is None or now < self.expires

    def to_json(self) -> dict[str, str | None]:
        """All of it but the digest, which only daemons need."""
        return {
            "id": self.token_id,
            "role": self.identity.role.value,
            "worker_id": self.identity.name or None,
            "created": self.created.isoformat(),
            "expires": None if self.expires is None else self.expires.isoformat(),
        }


@dataclass(frozen=True)
class TokenStore:
    """All tokens of a job.

    Attributes:
        entries: In the order in which they were made.
    """

    entries: tuple[TokenEntry, ...] = ()
    _by_digest: Mapping[bytes, TokenEntry] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_digest = {each.digest: each for each in self.entries}
        object.__setattr__(self, "_by_digest", by_digest)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file.

        Raises:
            CredentialsError: It can't be read, is damaged, or others could have
                changed it.
        """
        content = read_credential(path, "--tokens", is_secret=True)
        try:
            return cls.parse(content)
        except (CheckpointError, *UNREADABLE) as error:
            raise CredentialsError(
                f"--tokens {path} is no file of tokens: {printable(str(error))[:128]}; "
                f"`psctl token create --tokens {path}` makes one"
            ) from error

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Reads the bytes of a file.

        Raises:
            DamagedError: A field is not as it has to be.
            *UNREADABLE: It is damaged otherwise.
        """
        found = json.loads(content)
        _SHAPE(found, "tokens")
        entries = tuple(map(_read_entry, found["tokens"]))
        for what in ("token_id", "digest"):
            if len({getattr(each, what) for each in entries}) < len(entries):
                raise ValueError(f"two of its tokens have the same {what}")
        return cls(entries)

    def to_bytes(self) -> bytes:
        """The bytes of a file."""
        tokens = [
            {**each.to_json(), "sha256": each.digest.hex()} for each in self.entries
        ]
        content = {"version": _VERSION, "tokens": tokens}
        return f"{json.dumps(content, indent=2)}\n".encode()

    def find(self, token: str, now: datetime) -> TokenEntry | None:
        """The entry of a token, None for one that is unknown or has expired."""
        entry = self._by_digest.get(digest_of(token))
        return entry if entry is not None and entry.is_valid(now) else None

    def counts(self, entry: TokenEntry, now: datetime) -> bool:
        """Whether a token that once was found still is, and for the same."""
        return self._by_digest.get(entry.digest) == entry and entry.is_valid(now)


def _read_entry(found: dict[str, str | None]) -> TokenEntry:
    role, digest = Role(found["role"] or ""), bytes.fromhex(found["sha256"] or "")
    token_id, name = found["id"] or "", found["worker_id"] or ""
    if len(digest) != len(digest_of("")):
        raise ValueError(f"the SHA-256 of token {token_id[:64]!r} has another length")
    if not (token_id.isascii() and token_id.isalnum()):
        raise ValueError(f"{token_id[:64]!r} is no id of a token")
    if name and (role is not Role.WORKER or worker_id_problem(name)):
        raise ValueError(f"token {token_id!r} can't be of the worker {name[:64]!r}")
    expires = found["expires"]
    return TokenEntry(
        token_id=token_id,
        identity=Identity(role, name, f"token {token_id}"),
        digest=digest,
        created=_read_time(found["created"] or ""),
        expires=None if expires is None else _read_time(expires),
    )


def _read_time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
