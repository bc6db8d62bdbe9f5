"""Tokens, the file by which daemons know them, and roles."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pswire.security.credentials import Credentials, CredentialsError, TokenSource
from pswire.security.roles import Identity, Role
from pswire.security.token_store import TokenEntry, TokenStore
from pswire.security.tokens import (
    digest_of,
    metadata_of,
    new_token,
    shown_token,
    token_problem,
)

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


def entry(token: str, role: Role = Role.WORKER, name: str = "") -> TokenEntry:
    token_id = digest_of(token).hex()[:8]
    return TokenEntry(
        token_id=token_id,
        identity=Identity(role, name, f"token {token_id}"),
        digest=digest_of(token),
        created=NOON,
    )


def private_file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_new_token_is_one_and_differs_from_all_others() -> None:
    tokens = {new_token() for _ in range(100)}

    assert len(tokens) == 100
    assert not any(map(token_problem, tokens))


@pytest.mark.parametrize("text", ["", "short", "x" * 1025, "x y" * 10, "ü" * 30])
def test_other_texts_are_no_tokens_and_are_not_shown(text: str) -> None:
    problem = token_problem(text)

    assert problem
    assert not text or text not in problem


def test_a_call_shows_its_token() -> None:
    token = new_token()

    assert shown_token(metadata_of(token)) == token
    assert shown_token((("user-agent", "x"),)) is None
    assert shown_token(None) is None


def test_a_store_finds_a_token_until_it_expires() -> None:
    token = new_token()
    known = replace(entry(token), expires=NOON + timedelta(hours=1))
    store = TokenStore((entry(new_token()), known))

    assert store.find(token, NOON) == known
    assert store.find(token, NOON + timedelta(hours=1)) is None
    assert store.find(new_token(), NOON) is None
    assert store.counts(known, NOON)
    assert not store.counts(known, NOON + timedelta(hours=1))
    assert not TokenStore().counts(known, NOON)


def test_a_token_of_another_role_since_is_another_one() -> None:
    """Who has found it before must not go on under what it was."""
    known = entry(new_token())
    changed = replace(known, identity=Identity(Role.READER))

    assert not TokenStore((changed,)).counts(known, NOON)


def test_a_store_is_read_as_it_was_written(tmp_path: Path) -> None:
    late = replace(entry(new_token()), expires=NOON + timedelta(days=1))
    store = TokenStore((late, entry(new_token(), name="w0"), entry(new_token())))

    path = private_file(tmp_path / "tokens", store.to_bytes())

    assert TokenStore.read(path).entries == store.entries


TOKEN = new_token()
GOOD = json.loads(TokenStore((entry(TOKEN),)).to_bytes())
FIELDS = GOOD["tokens"][0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b'{"version": 1}',
        {"version": 2, "tokens": []},
        {"version": 1, "tokens": [{**FIELDS, "role": "root"}]},
        {"version": 1, "tokens": [{**FIELDS, "sha256": "00"}]},
        {"version": 1, "tokens": [{**FIELDS, "sha256": "x" * 64}]},
        {"version": 1, "tokens": [{**FIELDS, "expires": "tomorrow"}]},
        {"version": 1, "tokens": [{**FIELDS, "expire": None}]},
        {"version": 1, "tokens": [{**FIELDS, "role": "admin", "worker_id": "w0"}]},
        {"version": 1, "tokens": [{**FIELDS, "worker_id": "w\n0"}]},
        {"version": 1, "tokens": [{**FIELDS, "id": "../x"}]},
        {"version": 1, "tokens": [FIELDS, {**FIELDS, "id": "other"}]},
    ],
    ids=range(15),
)
def test_a_damaged_store_is_refused_with_the_cure(
    tmp_path: Path, content: object
) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path = private_file(tmp_path / "tokens", data)

    with pytest.raises(CredentialsError, match="psctl token create") as caught:
        TokenStore.read(path)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_files_that_others_can_read_or_write_are_refused(
    tmp_path: Path, mode: int
) -> None:
    store = private_file(tmp_path / "tokens", TokenStore().to_bytes(), mode)
    token = private_file(tmp_path / "token", new_token().encode(), mode)

    with pytest.raises(CredentialsError, match="chmod 600"):
        TokenStore.read(store)
    with pytest.raises(CredentialsError, match="chmod 600"):
        TokenSource(path=token)


def test_the_environment_names_a_token(tmp_path: Path) -> None:
    token = new_token()
    path = private_file(tmp_path / "token", f"{token}\n".encode())

    of_file = Credentials.from_environment({"PS_TOKEN_FILE": str(path)}).token
    of_value = Credentials.from_environment({"PS_TOKEN": token}).token

    assert of_file is not None
    assert of_value is not None
    assert of_file.metadata() == of_value.metadata() == metadata_of(token)
    with pytest.raises(CredentialsError, match="leave one of them out"):
        Credentials.from_environment({"PS_TOKEN_FILE": str(path), "PS_TOKEN": token})
    with pytest.raises(CredentialsError, match="PS_TOKEN has is no token"):
        Credentials.from_environment({"PS_TOKEN": "secret"})


def test_a_token_that_was_replaced_counts_from_the_next_call_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = new_token(), new_token()
    path = private_file(tmp_path / "token", first.encode())
    source = TokenSource(path=path)

    os.replace(private_file(tmp_path / "new", second.encode()), path)
    assert source.metadata() == metadata_of(second)

    os.replace(private_file(tmp_path / "new", b"damaged"), path)
    assert source.metadata() == source.metadata() == metadata_of(second)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["", "w0", "a/b ü"])
def test_a_certificate_names_role_and_worker(name: str) -> None:
    found = Identity.from_uri(Identity(Role.WORKER, name).uri)

    assert found == Identity(Role.WORKER, name)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "paramserver:worker",
        "paramserver:root/",
        "spiffe://worker/x",
        "worker/w0",
        "paramserver:worker/%ff",
        "paramserver:worker/%0a",
        "paramserver:Role/",
    ],
)
def test_other_names_of_a_certificate_are_none_of_ours(uri: str) -> None:
    assert Identity.from_uri(uri) is None
