"""The pages agree with each other and with the repository."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
README_LINES_MAX = 130
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        REPOSITORY / "deploy" / "README.md",
    ]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
GUARANTEE = re.compile(r"\bG\d{1,2}\b")
PATH_OF_A_TEST = re.compile(r"`((?:tests/|test_)[\w/]+(?:\.py)?)`")


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def anchors(page: Path) -> set[str]:
    """What a link may name of a page: its headings, as GitHub writes them."""
    text = page.read_text()
    named = set(re.findall(r'<a name="([^"]+)"', text))
    for heading in HEADING.findall(text):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        named.add(kept.replace(" ", "-"))
    return named


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n[a](#a-title) [b](#b) [c](no.md) [d](page.md#a-title)\n"
    )
    assert broken_links(page) == ["#b", "no.md"]


def test_the_readme_is_short_and_names_the_two_commands() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES_MAX
    assert "make demo" in text
    assert "make test" in text


def test_every_page_is_linked_from_the_readme_or_from_contributing() -> None:
    linked = {
        (REPOSITORY / link.partition("#")[0]).resolve()
        for name in ("README.md", "CONTRIBUTING.md")
        for link in LINK.findall((REPOSITORY / name).read_text())
    }
    pages = {page.resolve() for page in (REPOSITORY / "docs").glob("*.md")}
    assert pages - linked == set()


def test_each_guarantee_has_one_line_and_the_readme_names_no_other() -> None:
    page = (REPOSITORY / "docs" / "guarantees.md").read_text()
    rows = [row for row in page.splitlines() if GUARANTEE.match(row, 2)]
    named = [g for row in rows for g in GUARANTEE.findall(row.split("|")[1])]
    assert len(named) == len(set(named))
    for name in ("README.md", "docs/history.md"):
        said = GUARANTEE.findall((REPOSITORY / name).read_text())
        assert set(said) <= set(named), name


def test_the_tests_that_the_guarantees_name_are_there() -> None:
    page = (REPOSITORY / "docs" / "guarantees.md").read_text()
    missing = []
    for row in page.splitlines():
        folder = REPOSITORY
        for path in PATH_OF_A_TEST.findall(row):
            # A name without a folder is of the folder named before it.
            test = REPOSITORY / path if "/" in path else folder / path
            folder = test.parent
            if not test.exists():
                missing.append(path)
    assert missing == []


def missing_places(text: str) -> list[str]:
    named = re.findall(
        r"(?<![\w/])(?:protos|psctl|pswire|psserver|psworker|tests|examples|deploy)"
        r"/[\w/.]*[\w/]",
        text,
    )
    return [each for each in named if not (REPOSITORY / each).exists()]


# What decisions and the changelog name is as of their day.
@pytest.mark.parametrize(
    "page",
    [
        each
        for each in PAGES
        if each.name != "CHANGELOG.md" and each.parent.name != "decisions"
    ],
    ids=name_of,
)
def test_the_places_that_a_page_names_are_there(page: Path) -> None:
    assert missing_places(page.read_text()) == []


def test_a_place_that_is_not_there_is_noticed() -> None:
    text = "`psctl/mode.py`, `psctl/no_such.py`, `pswire/mode.py` and protos/no/such"
    assert missing_places(text) == [
        "psctl/no_such.py",
        "pswire/mode.py",
        "protos/no/such",
    ]
