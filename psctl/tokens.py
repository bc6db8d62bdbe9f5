"""`psctl token`: the file by which daemons know tokens, and the files of their holders.

The file of the daemons is written whole each time, while no other command changes it.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from psctl.failures import CommandError
from psctl.folders import placed, write_private
from psctl.tables import aligned
from pswire.exit_codes import ExitCode
from pswire.names import printable, worker_id_problem
from pswire.security.credentials import CredentialsError
from pswire.security.roles import Identity, Role
from pswire.security.token_store import TokenEntry, TokenStore
from pswire.security.tokens import digest_of, new_token, token_problem

SCHEMA_VERSION: Final = 1

_ID_BYTES: Final = 4
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}
_DAY_COUNT_MAX: Final = 36_500


@dataclass(frozen=True, slots=True)
class MadeToken:
    """A token that was made.

    Attributes:
        entry: As daemons know it.
        path: Where it was written, None if it is to be printed.
        token: The secret, empty if it was written.
    """

    entry: TokenEntry
    path: Path | None
    token: str


def parsed_lifetime(text: str) -> timedelta | None:
    """How long a token counts, None for ever.

    Raises:
        ValueError: The text says no such time.
    """
    if not text:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,7})([mhd])", text)
    if found is not None:
        lifetime = timedelta(**{_UNITS[found[2]]: int(found[1])})
        if lifetime.days <= _DAY_COUNT_MAX:
            return lifetime
    raise ValueError(
        f"{text[:32]!r} is no time: give a number with m, h or d, such as 30d, of at "
        f"most {_DAY_COUNT_MAX}d"
    )


def create(
    tokens: Path,
    role: Role,
    worker_id: str,
    lifetime: timedelta | None,
    out: Path | None,
) -> MadeToken:
    """Makes a token known, and then writes it."""
    if worker_id and role is not Role.WORKER:
        raise CommandError(
            f"--worker-id {printable(worker_id[:64])} has no meaning with --role "
            f"{role}: leave it out, or make a token of role worker",
            ExitCode.USAGE,
        )
    if worker_id and (problem := worker_id_problem(worker_id)):
        raise CommandError(
            f"the worker id {printable(worker_id[:64])!r} {problem}", ExitCode.USAGE
        )
    path = None if out is None else _checked_out(out)
    token, now = new_token(), datetime.now(UTC).replace(microsecond=0)
    token_id = secrets.token_hex(_ID_BYTES)
    entry = TokenEntry(
        token_id=token_id,
        identity=Identity(role, worker_id, f"token {token_id}"),
        digest=digest_of(token),
        created=now,
        expires=None if lifetime is None else now + lifetime,
    )
    with _changing(tokens) as store:
        _write(tokens, (*store.entries, entry))
    if path is None:
        return MadeToken(entry, None, token)
    write_private(path, f"{token}\n".encode())
    return MadeToken(entry, path, "")


def listed(tokens: Path) -> tuple[TokenEntry, ...]:
    return _read(tokens).entries


def revoke(tokens: Path, token_ids: Sequence[str]) -> tuple[TokenEntry, ...]:
    """Takes tokens from the file; what they were."""
    with _changing(tokens) as store:
        known = {each.token_id: each for each in store.entries}
        if unknown := [each for each in token_ids if each not in known]:
            raise CommandError(
                f"{printable(str(tokens))} has no token {printable(unknown[0][:64])}: "
                "`psctl token list` shows which it has; nothing was revoked"
            )
        gone = {each: known[each] for each in token_ids}
        _write(tokens, [each for each in store.entries if each.token_id not in gone])
    return tuple(gone.values())


def made_json(made: MadeToken) -> dict[str, object]:
    found = {"schema_version": SCHEMA_VERSION, **_entry_json(made.entry)}
    found["path"] = None if made.path is None else str(made.path)
    return {**found, "token": made.token} if made.token else found


def made_text(made: MadeToken) -> str:
    if made.token:
        return made.token
    entry = made.entry
    return (
        f"token {entry.token_id} of role {entry.identity.role} is in "
        f"{printable(str(made.path))}{_ending_text(entry)}"
    )


def tokens_json(entries: Sequence[TokenEntry]) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "tokens": list(map(_entry_json, entries)),
    }


def tokens_text(entries: Sequence[TokenEntry]) -> str:
    if not entries:
        return "there are no tokens: nobody may call"
    rows = [
        (
            each.token_id,
            each.identity.role,
            each.identity.name or "any" * (each.identity.role is Role.WORKER),
            f"{each.created:%Y-%m-%d %H:%M}",
            _end_text(each),
        )
        for each in entries
    ]
    return aligned(("id", "role", "worker", "made (UTC)", "ends"), rows)


def _entry_json(entry: TokenEntry) -> dict[str, object]:
    return {**entry.to_json(), "valid": entry.is_valid(datetime.now(UTC))}


def _end_text(entry: TokenEntry) -> str:
    if entry.expires is None:
        return "never"
    if not entry.is_valid(datetime.now(UTC)):
        return "ended"
    return f"{entry.expires:%Y-%m-%d %H:%M}"


def _ending_text(entry: TokenEntry) -> str:
    return "" if entry.expires is None else f", until {_end_text(entry)} UTC"


def _checked_out(out: Path) -> Path:
    """Where a token may be written: a new file, or one that has a token."""
    path = placed(out)
    if path.is_dir():
        raise CommandError(f"--out {printable(str(out))} is a folder", ExitCode.USAGE)
    if path.exists() and token_problem(path.read_text(errors="replace").strip()):
        raise CommandError(
            f"--out {printable(str(out))} is there, and no token is in it: name "
            "another file",
            ExitCode.USAGE,
        )
    return path


@contextmanager
def _changing(tokens: Path) -> Iterator[TokenStore]:
    """The store, which no other command changes meanwhile; a new one if need be."""
    folder = os.open(placed(tokens).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield _read(tokens) if tokens.exists() else TokenStore()
    finally:
        os.close(folder)


def _read(tokens: Path) -> TokenStore:
    try:
        return TokenStore.read(tokens)
    except CredentialsError as error:
        raise CommandError(printable(str(error)), ExitCode.BAD_CONFIGURATION) from error


def _write(tokens: Path, entries: Sequence[TokenEntry]) -> None:
    write_private(tokens, TokenStore(tuple(entries)).to_bytes())
