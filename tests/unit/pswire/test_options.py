"""Options that set what a process and those that it starts prove themselves with."""

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pswire.exit_codes import ExitCode
from pswire.options import takes_credentials

VARIABLES = ("PS_TLS_CA", "PS_TLS_CERT", "PS_TLS_KEY")

app = typer.Typer()


@app.command()
@takes_credentials
def shown(word: str) -> None:
    typer.echo(json.dumps([word, *(os.environ.get(name, "") for name in VARIABLES)]))


@pytest.fixture(autouse=True)
def without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # undone after the test, which may set it


def test_options_win_over_variables_and_hold_in_any_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PS_TLS_CERT", "of-variable.pem")
    monkeypatch.setenv("PS_TLS_KEY", "of-variable-key.pem")

    found = CliRunner().invoke(
        app, ["word", "--tls-ca=sub/ca.pem", "--tls-cert=of-option.pem"]
    )

    assert found.exit_code == ExitCode.DONE, found.output
    names = ("sub/ca.pem", "of-option.pem", "of-variable-key.pem")
    assert json.loads(found.stdout) == ["word", *(str(tmp_path / n) for n in names)]


def test_without_any_nothing_is_set() -> None:
    found = CliRunner().invoke(app, ["word"])
    assert json.loads(found.stdout) == ["word", "", "", ""]


def test_a_certificate_without_its_key_is_a_wrong_command_line() -> None:
    found = CliRunner().invoke(app, ["word", "--tls-cert=c.pem"])
    assert found.exit_code == ExitCode.USAGE
    assert "without --tls-key" in " ".join(found.stderr.split())
