"""The bugs that `make mutants` plants still fit the sources."""

from pathlib import Path

import pytest

from tests.mutation.__main__ import (
    CORE_SUITES,
    ROOT,
    Suites,
    Trial,
    every_suite,
    first_failure,
    report,
    suites_of,
)
from tests.mutation.catalogue import BUGS
from tests.mutation.planted_bug import Edit, PlantedBug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_bug_finds_its_place(bug: PlantedBug, tmp_path: Path) -> None:
    files = {edit.file for edit in bug.edits}
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())

    bug.plant(tmp_path)

    for file in files:
        planted = (tmp_path / file).read_text()
        assert planted != (ROOT / file).read_text()
        if file.endswith(".py"):  # those of the page and the chart are read by others
            compile(planted, file, "exec")


def test_names_tell_bugs_apart() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_tests_that_notice_a_bug_are_there(bug: PlantedBug) -> None:
    for test in bug.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        if name:
            function = name.rpartition("::")[2].partition("[")[0]
            assert f"def {function}(" in (ROOT / file).read_text(), test


def bug_in(file: str, *tests: str) -> PlantedBug:
    return PlantedBug("a bug", (Edit(file, "old", "new"),), tests)


CORE_FILE = "psserver/shard/core/push.py"


@pytest.mark.parametrize(
    ("bug", "is_whole", "expected"),
    [
        (bug_in(CORE_FILE, "t.py::a", "t.py::b"), False, (("t.py::a", "t.py::b"),)),
        (bug_in(CORE_FILE, "t.py::a"), True, CORE_SUITES),
        (bug_in(CORE_FILE), False, CORE_SUITES),
        (bug_in("psworker/optim/optimizer.py", "t.py"), True, (("t.py",),)),
    ],
)
def test_a_bug_is_tried_on_the_tests_that_it_names(
    bug: PlantedBug, expected: Suites, *, is_whole: bool
) -> None:
    assert suites_of(bug, is_whole=is_whole) == expected


def test_what_passes_without_bugs_has_each_test_once() -> None:
    bugs = [
        bug_in(CORE_FILE, "b.py::x"),
        bug_in(CORE_FILE, "b.py::x", "a.py"),
        bug_in("psworker/optim/optimizer.py", "a.py"),
    ]
    assert every_suite(bugs, is_whole=False) == (["a.py", "b.py::x"],)
    assert every_suite(bugs, is_whole=True) == (["a.py"], *CORE_SUITES)
    assert every_suite([bug_in(CORE_FILE)], is_whole=False) == CORE_SUITES


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("F\n= short =\nFAILED t.py::a - AssertionError: b - c\n1 failed", "t.py::a"),
        ("FAILED t.py::a[b c]\nFAILED t.py::d", "t.py::a[b c]"),
        ("E\nERROR t.py::a - LookupError", "t.py::a"),
    ],
)
def test_the_first_failure_is_named(output: str, expected: str) -> None:
    assert first_failure(output) == expected


def test_a_failure_without_a_name_is_no_outcome() -> None:
    with pytest.raises(RuntimeError, match="names no test"):
        first_failure("1 failed")


def test_a_bug_that_was_not_noticed_ends_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    noticed = Trial("one", "t.py::a", "", 1.0)
    assert report([noticed]) == 0
    assert report([noticed, Trial("two", "", "", 2.0)]) == 1
    assert report([noticed, Trial("three", "", "NO TESTS", 2.0)]) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 bugs were noticed\ntwo: NOT NOTICED\n" in printed
    assert "three: NO TESTS" in printed
