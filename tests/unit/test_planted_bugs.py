"""The bugs that `make mutants` plants still fit the sources."""

from pathlib import Path

import pytest

from tests.mutation.__main__ import ROOT
from tests.mutation.catalogue import BUGS
from tests.mutation.planted_bug import PlantedBug


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
        compile(planted, file, "exec")


def test_names_tell_bugs_apart() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_tests_that_notice_a_bug_are_there(bug: PlantedBug) -> None:
    assert [
        test for test in bug.tests if not (ROOT / test.partition("::")[0]).exists()
    ] == []
