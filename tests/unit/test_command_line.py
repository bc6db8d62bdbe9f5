"""What every command promises: it starts without torch, and knows its versions."""

import subprocess
import sys

import pytest

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
