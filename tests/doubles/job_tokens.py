"""Tokens of a job under test: the file that daemons read, and one for each caller."""

import os
from datetime import UTC, datetime
from pathlib import Path

from pswire.security.credentials import Credentials, TokenSource
from pswire.security.roles import Identity, Role
from pswire.security.token_store import TokenEntry, TokenStore
from pswire.security.tokens import Metadata, digest_of, metadata_of, new_token


class JobTokens:
    """Tokens in a folder, by the file of each.

    Attributes:
        store: What daemons read.
    """

    def __init__(self, folder: Path) -> None:
        """Makes a token without a name for each role."""
        self._folder = folder
        self.store = folder / "tokens.json"
        self._entries: dict[str, TokenEntry] = {}
        for role in Role:
            self.create(role.value, role)

    def create(
        self,
        file_name: str,
        role: Role = Role.WORKER,
        worker_id: str = "",
        expires: datetime | None = None,
    ) -> Path:
        """Writes a new token to a file, and its digest to the store.

        A token that the file had stays known under another name, until it is revoked.
        """
        token = new_token()
        token_id = digest_of(token).hex()[:8]
        if (former := self._entries.pop(file_name, None)) is not None:
            self._entries[f"former {file_name}"] = former
        self._entries[file_name] = TokenEntry(
            token_id=token_id,
            identity=Identity(role, worker_id, f"token {token_id}"),
            digest=digest_of(token),
            created=datetime.now(UTC),
            expires=expires,
        )
        self._write_store()
        return write_private(self._folder / file_name, token.encode())

    def revoke(self, name: str) -> None:
        """Takes a token from the store."""
        del self._entries[name]
        self._write_store()

    def path(self, file_name: str) -> Path:
        return self._folder / file_name

    def metadata(self, file_name: str) -> Metadata:
        """What a call shows."""
        return metadata_of(self.path(file_name).read_text())

    def credentials(self, role: Role) -> Credentials:
        """What a process of a role proves itself with."""
        return Credentials(token=TokenSource(path=self.path(role.value)))

    def _write_store(self) -> None:
        store = TokenStore(tuple(self._entries.values()))
        write_private(self.store, store.to_bytes())


def write_private(path: Path, content: bytes) -> Path:
    """Replaces a file by one that nobody else may read; its path."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.chmod(0o600)
    os.replace(new, path)
    return path
