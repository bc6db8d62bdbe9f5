"""Programs of Debian that tests run: installed when the first test needs one."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

TIMEOUT_S: Final = 300
"""Of an installation: Debian's Chromium, with what it needs, is 120 MB."""


def require(package: str, program: str = "") -> Path:
    """Where a program is; installs its package first, where this user may.

    Several processes of tests may ask at once. Skips the test, with the reason, where
    there is none.

    Args:
        package: Debian's name of the package.
        program: What it brings, where that has another name.
    """
    name = program or package
    lock = Path(tempfile.gettempdir()) / f"paramserver-tests-apt-{os.geteuid()}"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = shutil.which(name)
        problem = "" if found is not None else _install(package)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: {problem or f'{package} does not bring it'}")
    return Path(found)


def _install(package: str) -> str:
    """Installs a package; why it could not be, empty if it is."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"as root, apt-get install {package}"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["install", "--yes", "--no-install-recommends", package]
    for arguments in (["update"], install):
        try:
            done = subprocess.run(
                ["apt-get", "--quiet", "--quiet", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {arguments[0]} took more than {TIMEOUT_S} s"
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return f"apt-get {arguments[0]}: {lines[-1] if lines else done.returncode}"
    return ""
