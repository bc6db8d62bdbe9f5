"""Installs the wheel where nothing else is, and runs it there: `make wheel-check`.

The wheel is built from the source distribution, as an index would have both. It goes
into an empty environment, in a folder that holds nothing of the repository, first
without extras and then with that of the demo. Takes minutes: torch is installed anew.

    python -m tests.wheel_check
"""

import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
TORCH: Final = "torch==2.13.0"
COMMAND_TIMEOUT_S: Final = 900.0
COMMANDS: Final = ("psserver", "psworker", "psctl")
IMPORTED: Final = """
import pathlib, psworker, psserver, psctl, pswire
homes = {pathlib.Path(each.__file__).parents[1] for each in (
    psworker, psserver, psctl, pswire)}
assert len(homes) == 1 and homes.pop().name == "site-packages", homes
assert psworker.connect.__doc__
"""


class WheelCheckError(Exception):
    """A command did not do what a user of the wheel expects."""


def build(kind: str, source: Path, into: Path) -> Path:
    """Builds `sdist` or `wheel` of a source tree; where it is.

    Raises:
        subprocess.CalledProcessError: It could not be built.
    """
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", into],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (built,) = into.iterdir()
    return built


def unpacked(sdist: Path, into: Path) -> Path:
    """The root of the source tree in a source distribution."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (root,) = into.iterdir()
    return root


class Installation:
    """An empty environment, and an empty folder to run its commands in."""

    def __init__(self, folder: Path) -> None:
        self._bin = folder / "environment" / "bin"
        venv.create(folder / "environment", with_pip=True)
        self.work = folder / "work"
        self.work.mkdir()
        # Nothing that leads back: neither our settings nor the repository's commands.
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PS_", "PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS"))
        } | {"PATH": os.pathsep.join([str(self._bin), os.defpath]), "NO_COLOR": "1"}

    def run(self, *command: str, code: int = 0) -> str:
        """Runs a command of the environment; what it wrote.

        Raises:
            WheelCheckError: It ended with another exit code.
        """
        print("$", " ".join(command[:1] + tuple(map(shown, command[1:]))), flush=True)
        done = subprocess.run(
            [str(self._bin / command[0]), *command[1:]],
            cwd=self.work,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        if done.returncode != code:
            raise WheelCheckError(
                f"{command[0]} ended with {done.returncode}, not {code}:\n{done.stdout}"
            )
        return done.stdout

    def install(self, *what: str) -> None:
        """Installs requirements at the versions of constraints.txt."""
        quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
        pins = ("--constraint", str(REPOSITORY / "constraints.txt"))
        self.run("pip", "install", *quiet, *pins, *what)


def shown(argument: str) -> str:
    """An argument as it is printed: a script by its first word, a path by its name."""
    return "..." if "\n" in argument else argument.rpartition("/")[2]


def expect(text: str, *parts: str) -> None:
    """Raises a WheelCheckError unless a text has all of these."""
    for part in parts:
        if part not in text:
            raise WheelCheckError(f"{part!r} is not in:\n{text}")


def check(installation: Installation, wheel: Path) -> None:
    """Does with the wheel what a new user does."""
    # By its exact version, first and alone: else pip may choose a build with CUDA.
    installation.install(TORCH)
    installation.install(str(wheel))
    installation.run("pip", "check")
    installation.run("python", "-c", IMPORTED)
    version = wheel.name.split("-")[1]
    for command in COMMANDS:
        expect(installation.run(command, "--version"), f"paramserver {version}")
        expect(installation.run(command, "--help"), "Usage")
    expect(installation.run("psctl", "demo", code=78), "paramserver[demo]")
    installation.install(f"{wheel}[demo]")
    out = installation.run("psctl", "demo", "--epochs", "3")
    expect(out, "test accuracy of the pulled snapshot", "test accuracy of one process")
    print("\n".join(line for line in out.splitlines() if "test accuracy" in line))


def main(arguments: Sequence[str]) -> int:
    """Builds, installs, runs; 0 if all of it works."""
    if arguments:
        print("takes no arguments", file=sys.stderr)
        return 2
    with TemporaryDirectory(prefix="paramserver-wheel-") as scratch:
        folder = Path(scratch)
        sdist = build("sdist", REPOSITORY, folder / "sdist")
        source = unpacked(sdist, folder / "source")
        wheel = build("wheel", source, folder / "wheel")
        print(f"{sdist.name}, and {wheel.name} built from it")
        try:
            check(Installation(folder), wheel)
        except WheelCheckError as error:
            print(error, file=sys.stderr)
            return 1
    print("the wheel works in an empty environment")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
