"""`psctl token`: secrets are in their files alone, daemons get digests."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from psctl.__main__ import app
from psctl.tokens import create, parsed_lifetime
from pswire.security.credentials import TokenSource
from pswire.security.roles import Role
from pswire.security.token_store import TokenStore
from pswire.security.tokens import metadata_of, shown_token


def token(tokens: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["token", *arguments, f"--tokens={tokens}"], env={"PS_TOKENS": ""}
    )


def found(tokens: Path, path: Path) -> Any:  # noqa: ANN401
    shown = shown_token(TokenSource(path=path).metadata())
    assert shown is not None
    return TokenStore.read(tokens).find(shown, datetime.now(UTC))


def test_a_token_is_in_its_file_alone(tmp_path: Path) -> None:
    tokens, out = tmp_path / "tokens.json", tmp_path / "w0.token"
    result = token(
        tokens,
        *("create", "--role=worker", "--worker-id=w0", "--expires=12h"),
        f"--out={out}",
    )

    assert result.exit_code == 0, result.output
    secret = out.read_text().strip()
    assert secret not in result.output + tokens.read_text()
    assert {path.stat().st_mode & 0o777 for path in (tokens, out)} == {0o600}
    entry = found(tokens, out)
    assert (entry.identity.role, entry.identity.name) == (Role.WORKER, "w0")
    assert entry.expires - entry.created == timedelta(hours=12)


def test_a_token_is_printed_when_asked_for(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    printed = token(tokens, "create", "--role=reader", "--print").stdout.strip()

    assert metadata_of(printed)
    assert TokenStore.read(tokens).find(printed, datetime.now(UTC)) is not None
    assert token(tokens, "create", "--role=reader").exit_code == 2


def test_a_token_is_replaced_and_the_former_one_revoked(tmp_path: Path) -> None:
    tokens, out = tmp_path / "tokens.json", tmp_path / "shard.token"
    first = create(tokens, Role.SHARD, "", None, out).entry
    second = create(tokens, Role.SHARD, "", None, out).entry
    assert TokenStore.read(tokens).entries == (first, second)
    assert found(tokens, out) == second

    assert token(tokens, "revoke", "none").exit_code == 1
    assert token(tokens, "revoke", first.token_id).exit_code == 0
    assert TokenStore.read(tokens).entries == (second,)


def test_listing_shows_no_digest(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    made = create(tokens, Role.WORKER, "w0", timedelta(minutes=1), tmp_path / "t").entry

    text = token(tokens, "list").stdout
    listed = json.loads(token(tokens, "list", "--json").stdout)["tokens"]

    assert made.token_id in text
    assert made.digest.hex() not in text
    assert [(each["worker_id"], each["valid"]) for each in listed] == [("w0", True)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--role=reader", "--worker-id=w0"),
        ("--role=worker", "--worker-id=a\nb"),
        ("--role=root",),
        ("--role=worker", "--expires=tomorrow"),
        ("--role=worker", "--expires=0d"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_written(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    tokens, out = tmp_path / "tokens.json", tmp_path / "out"
    result = token(tokens, "create", *arguments, f"--out={out}")

    assert result.exit_code != 0
    assert list(tmp_path.iterdir()) == []


def test_no_other_file_is_replaced(tmp_path: Path) -> None:
    tokens, out = tmp_path / "tokens.json", tmp_path / "thesis.tex"
    out.write_text("a year of work")

    assert token(tokens, "create", "--role=admin", f"--out={out}").exit_code != 0
    assert out.read_text() == "a year of work"
    assert not tokens.exists()


def test_a_file_that_others_can_change_is_not_added_to(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    create(tokens, Role.ADMIN, "", None, tmp_path / "a")
    os.chmod(tokens, 0o666)
    before = tokens.read_bytes()

    result = token(tokens, "create", "--role=admin", f"--out={tmp_path / 'b'}")

    assert "chmod 600" in str(result.exception)
    assert tokens.read_bytes() == before


def test_commands_at_the_same_time_lose_no_token(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"

    def make(number: int) -> str:
        path = tmp_path / f"{number}.token"
        return create(tokens, Role.WORKER, "", None, path).entry.token_id

    with ThreadPoolExecutor(4) as threads:
        made = set(threads.map(make, range(12)))

    assert {each.token_id for each in TokenStore.read(tokens).entries} == made


@pytest.mark.parametrize(
    ("text", "lifetime"),
    [("", None), ("90m", timedelta(minutes=90)), ("30d", timedelta(days=30))],
)
def test_a_lifetime_is_read(text: str, lifetime: timedelta | None) -> None:
    assert parsed_lifetime(text) == lifetime
