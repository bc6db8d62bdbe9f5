"""A token: a secret that its holder shows with each call.

A server knows tokens by their digests alone. They are random enough that a digest
without salt or work is no way back. Pure but for the drawing of new ones.
"""

import hashlib
import secrets
from typing import Final

METADATA_KEY: Final = "authorization"
"""Metadata of a call that shows a token, after `Bearer`, as in HTTP (RFC 6750)."""

_SCHEME: Final = "Bearer "

_PREFIX: Final = "pst_"
"""By which scanners for secrets that were published find ours."""

_RANDOM_BYTES: Final = 32
_LENGTH_MIN: Final = 20
_LENGTH_MAX: Final = 1024

Metadata = tuple[tuple[str, str], ...]


def new_token() -> str:
    """A token that nobody can guess."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def token_problem(token: str) -> str:
    """Why a text is no token, in words that don't show it; empty where it is one."""
    if not _LENGTH_MIN <= len(token) <= _LENGTH_MAX:
        return f"has {len(token)} characters, of {_LENGTH_MIN} to {_LENGTH_MAX}"
    if not (token.isascii() and token.isprintable()) or " " in token:
        return "has other characters than letters, digits and signs"
    return ""


def digest_of(token: str) -> bytes:
    """SHA-256 of a token."""
    return hashlib.sha256(token.encode()).digest()


def metadata_of(token: str) -> Metadata:
    """What a call shows."""
    return ((METADATA_KEY, _SCHEME + token),)


def shown_token(metadata: Metadata | None) -> str | None:
    """The token that a call shows, None if it shows none."""
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, str):
            return value.removeprefix(_SCHEME)
    return None
