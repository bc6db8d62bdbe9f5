"""What every command promises: it starts without torch, and knows its versions."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from psserver.__main__ import app as psserver_app
from psworker.__main__ import app as psworker_app
from psworker.ctl.__main__ import app as psctl_app

COMMANDS = ["psserver", "psworker", "psworker.ctl"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_import_torch(command: str) -> None:
    # As the installed script does, but telling afterwards what it loaded.
    program = f"""
import sys
from {command}.__main__ import main
sys.argv = ["command", "--help"]
try:
    main()
finally:
    slow = [name for name in ("torch", "sklearn", "scipy") if name in sys.modules]
    print("LOADED", slow, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    assert "LOADED []" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_version_names_what_is_installed(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", command, "--version"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for package in ("paramserver", "torch", "grpcio", "protobuf"):
        assert f"{package} " in done.stdout


def helps(app: typer.Typer, command: Any, *names: str) -> Iterator[str]:  # noqa: ANN401
    """The help of a command and of all below it, as a terminal of 80 columns has it."""
    yield CliRunner().invoke(app, [*names, "--help"], terminal_width=80).output
    for below, each in getattr(command, "commands", {}).items():
        yield from helps(app, each, *names, below)


@pytest.mark.parametrize("app", [psserver_app, psworker_app, psctl_app])
def test_no_text_of_a_help_is_cut_or_broken_within_a_word(app: typer.Typer) -> None:
    texts = list(helps(app, typer.main.get_command(app)))

    assert len(texts) > 1
    for text in texts:
        assert text.startswith("Usage: ")
        _, _, listed = text.partition("\nCommands:\n")
        assert "..." not in listed
        assert not re.search(r"\w-$", text, re.MULTILINE)
        assert max(map(len, text.splitlines())) <= 80
