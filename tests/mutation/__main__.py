"""Plants each bug of the catalogue in a copy of the sources and runs its tests.

`python -m tests.mutation [--whole] [NAME...]`, or `make mutants`. Two bugs at a time;
progress goes to stderr, a table of all of them to stdout. Exit code 1 when a bug goes
unnoticed or could not be tried, or the sources fail without one.

A bug is tried on the tests that it names. With `--whole`, and where it names none, a
bug of the core is tried on the drawn schedules first, then on the core's unit tests.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from psctl.tables import aligned
from tests.mutation.catalogue import BUGS
from tests.mutation.planted_bug import PlantedBug

ROOT: Final = Path(__file__).resolve().parents[2]

FOLDERS: Final = (
    "psserver",
    "psworker",
    "psctl",
    "protos/pswire",
    "deploy",
    "tests",
    "docs",
    "examples",
)

CORE_SUITES: Final = (
    ("tests/property/test_core_schedules.py", "-k", "promise"),
    ("tests/unit/psserver/coordinator/core", "tests/unit/psserver/shard/core"),
)

SCHEDULE_COUNT: Final = "2800"

AT_A_TIME: Final = 2

TIMEOUT_S: Final = 900
"""Of the tests of one bug."""

CLEAN_TIMEOUT_S: Final = 1800
"""Of the tests of all bugs, on sources without any."""

Suites = Sequence[Sequence[str]]
"""Arguments of one run of pytest after the other, until one fails."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one bug.

    Attributes:
        name: Of the bug.
        noticed_by: The first test that failed; empty when all passed.
        problem: Why it could not be tried; empty when it was.
        took_s: How long its tests ran.
    """

    name: str
    noticed_by: str
    problem: str
    took_s: float

    @property
    def said(self) -> str:
        """The outcome, for people."""
        return self.noticed_by or self.problem or "NOT NOTICED"


def main(arguments: list[str]) -> int:
    """Runs the catalogue; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs; all if none")
    parser.add_argument(
        "--whole", action="store_true", help="try bugs of the core on all its tests"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {bug.name for bug in BUGS}
    if unknown:
        names = "\n".join(f"  {bug.name}" for bug in BUGS)
        print(f"no such bug: {', '.join(sorted(unknown))}; there are\n{names}")
        return 2
    bugs = [bug for bug in BUGS if not options.names or bug.name in options.names]
    with tempfile.TemporaryDirectory() as folder:
        clean = Path(folder) / "clean"
        copy_sources(ROOT, clean)
        suites = every_suite(bugs, is_whole=options.whole)
        tell(f"{len(bugs)} bugs; their tests without any of them first")
        try:
            broken = noticed_by(clean, suites, CLEAN_TIMEOUT_S)
        except RuntimeError as error:
            broken = str(error)
        if broken:
            print(f"without any bug there fails, to be mended first: {broken}")
            return 1
        trials = run_trials(bugs, clean, is_whole=options.whole)
    return report(trials)


def tell(line: str) -> None:
    """Says how far it is."""
    print(line, file=sys.stderr, flush=True)


def is_of_core(bug: PlantedBug) -> bool:
    """Whether the core's own tests are those that have to notice it."""
    cores = ("psserver/coordinator/core/", "psserver/shard/core/")
    return all(edit.file.startswith(cores) for edit in bug.edits)


def suites_of(bug: PlantedBug, *, is_whole: bool) -> Suites:
    """What a bug is tried on."""
    if not bug.tests or (is_whole and is_of_core(bug)):
        return CORE_SUITES
    return (bug.tests,)


def every_suite(bugs: Sequence[PlantedBug], *, is_whole: bool) -> Suites:
    """What has to pass without any bug, each test once."""
    found = [suites_of(bug, is_whole=is_whole) for bug in bugs]
    of_bugs = [suites[0] for suites in found if suites is not CORE_SUITES]
    # pytest leaves out a test whose file is named before.
    named = sorted(
        {test for tests in of_bugs for test in tests},
        key=lambda test: ("::" in test, test),
    )
    whole = CORE_SUITES if CORE_SUITES in found else ()
    return (*([named] if named else []), *whole)


def copy_sources(source: Path, target: Path) -> None:
    """Copies what the tests need."""
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / folder, target / folder, ignore=ignored)
    shutil.copy(source / "pyproject.toml", target)


def run_trials(
    bugs: Sequence[PlantedBug], clean: Path, *, is_whole: bool
) -> list[Trial]:
    """Tries each, a few at a time; in the order of the bugs."""
    done = 0

    def try_one(bug: PlantedBug, mutant: Path) -> Trial:
        nonlocal done
        trial = tried(bug, clean, mutant, suites_of(bug, is_whole=is_whole))
        done += 1
        tell(f"{done}/{len(bugs)} {bug.name}: {trial.said} ({trial.took_s:.0f} s)")
        return trial

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        waiting = [
            threads.submit(partial(try_one, bug, clean.with_name(f"mutant-{number}")))
            for number, bug in enumerate(bugs)
        ]
        return [each.result() for each in waiting]


def tried(bug: PlantedBug, clean: Path, mutant: Path, suites: Suites) -> Trial:
    """Runs the tests of a bug on a copy that has it.

    One that can't be tried ends no other one's trial.
    """
    copy_sources(clean, mutant)
    found = problem = ""
    began_s = time.monotonic()
    try:
        bug.plant(mutant)
        found = noticed_by(mutant, suites, TIMEOUT_S)
    except (LookupError, RuntimeError) as error:
        problem = f"COULD NOT BE TRIED: {error}"
    finally:
        shutil.rmtree(mutant)
    return Trial(bug.name, found, problem, time.monotonic() - began_s)


def noticed_by(folder: Path, suites: Suites, timeout_s: float) -> str:
    """The first test that fails in a copy; empty when all pass.

    Raises:
        RuntimeError: The tests could not be run, or did not end.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'protos'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PS_SIM_SCHEDULES": SCHEDULE_COUNT,
    }
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly"]
    for arguments in suites:
        try:
            run = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"its tests did not end in {timeout_s:g} s") from None
        output = run.stdout.decode(errors="replace")
        if run.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {run.returncode}: {output[-2000:]}")
        if run.returncode == 1:
            return first_failure(output)
    return ""


_FAILURE: Final = re.compile(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", re.MULTILINE)


def first_failure(output: str) -> str:
    """The test that failed first, by what pytest prints at its end.

    Raises:
        RuntimeError: It names none.
    """
    found = _FAILURE.search(output)
    if found is None:
        raise RuntimeError(f"pytest names no test that failed: {output[-2000:]}")
    return found[1]


def report(trials: Sequence[Trial]) -> int:
    """Prints the table; returns the exit code."""
    rows = [
        (trial.name, f"{trial.took_s:.0f}", trial.said.splitlines()[0])
        for trial in trials
    ]
    print(aligned(("bug", "s", "noticed by"), rows))
    missed = [trial for trial in trials if not trial.noticed_by]
    print(f"\n{len(trials) - len(missed)} of {len(trials)} bugs were noticed")
    for trial in missed:
        print(f"{trial.name}: {trial.said}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
