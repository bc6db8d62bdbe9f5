"""The Tab key completes commands in the shells that people use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(sys.executable).parent
# What each shell does when Tab is pressed after `psctl snapshot g`.
PRESSED = {
    "bash": """
eval "$(psctl --show-completion)"
COMP_WORDS=(psctl snapshot g) COMP_CWORD=2
_psctl_completion psctl
echo "${COMPREPLY[@]}"
""",
    "zsh": """
autoload -Uz compinit && compinit -u
eval "$(psctl --show-completion)"
_arguments() { print -r -- "$@" }
words=(psctl snapshot g) CURRENT=3
_psctl_completion
""",
}


@pytest.mark.parametrize("shell", PRESSED)
def test_a_shell_completes_a_command(shell: str, tmp_path: Path) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"there is no {shell} on this machine")
    done = subprocess.run(
        [path, "-c", PRESSED[shell]],
        env={
            "HOME": str(tmp_path),
            "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "get" in done.stdout, done
    assert "list" not in done.stdout
