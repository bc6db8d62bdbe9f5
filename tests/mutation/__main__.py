"""Plants each bug of the catalogue in a copy of the sources and runs its tests.

`python -m tests.mutation [NAME...]`, or `make mutants`. Exit code 1 when a bug goes
unnoticed, or the sources fail without one. A bug that names no tests is tried on the
drawn schedules first, then on the core's unit tests; which of them noticed is printed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.mutation.catalogue import BUGS
from tests.mutation.planted_bug import PlantedBug

ROOT: Final = Path(__file__).resolve().parents[2]

FOLDERS: Final = ("psserver", "psworker", "protos/pswire", "tests")

CORE_SUITES: Final = {
    "schedules": ["tests/property/test_core_schedules.py", "-k", "promise"],
    "unit tests": ["tests/unit/psserver/core"],
}

SCHEDULE_COUNT: Final = "2280"

TIMEOUT_S: Final = 600


def main(wanted: list[str]) -> int:
    """Runs the catalogue; returns the exit code."""
    unknown = set(wanted) - {bug.name for bug in BUGS}
    if unknown:
        names = "\n".join(f"  {bug.name}" for bug in BUGS)
        print(f"no such bug: {', '.join(sorted(unknown))}; there are\n{names}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        clean = Path(folder) / "clean"
        copy_sources(ROOT, clean)
        broken = noticed_by(clean, every_suite(wanted))
        if broken:
            print(f"the {broken} fail without any bug: mend that first")
            return 1
        unnoticed = [
            bug.name
            for bug in BUGS
            if (not wanted or bug.name in wanted)
            and not is_noticed(bug, clean, Path(folder) / "mutant")
        ]
    if unnoticed:
        print(f"unnoticed: {', '.join(unnoticed)}")
    return 1 if unnoticed else 0


def suites_of(bug: PlantedBug) -> dict[str, list[str]]:
    """Arguments of pytest, by what they run."""
    return {"named tests": list(bug.tests)} if bug.tests else CORE_SUITES


def every_suite(wanted: list[str]) -> dict[str, list[str]]:
    """What has to pass without any bug."""
    bugs = [bug for bug in BUGS if not wanted or bug.name in wanted]
    named = sorted({test for bug in bugs for test in bug.tests})
    found = {"named tests": named} if named else {}
    return found if all(bug.tests for bug in bugs) else CORE_SUITES | found


def copy_sources(source: Path, target: Path) -> None:
    """Copies what the tests need."""
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / folder, target / folder, ignore=ignored)
    shutil.copy(source / "pyproject.toml", target)


def is_noticed(bug: PlantedBug, clean: Path, mutant: Path) -> bool:
    """Whether some test fails with the bug in; says so."""
    copy_sources(clean, mutant)
    try:
        bug.plant(mutant)
        started_s = time.monotonic()
        suite = noticed_by(mutant, suites_of(bug))
        took_s = time.monotonic() - started_s
    finally:
        shutil.rmtree(mutant)
    found = f"noticed by the {suite}" if suite else "NOT NOTICED"
    print(f"{bug.name}: {found} in {took_s:.0f} s", flush=True)
    return bool(suite)


def noticed_by(folder: Path, suites: dict[str, list[str]]) -> str:
    """The first suite that fails in a copy; empty when all pass."""
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'protos'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PS_SIM_SCHEDULES": SCHEDULE_COUNT,
    }
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    for name, arguments in suites.items():
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(
                f"pytest could not run in {folder}: {done.stdout.decode()[-2000:]}"
            )
        if done.returncode == 1:
            return name
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
