"""The pages agree with each other and with the repository."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import psworker
from psserver.coordinator.core.diagnosis import Cause
from psserver.coordinator.core.events import EventKind
from pswire.exit_codes import ExitCode
from pswire.reasons import ErrorReason
from tests.doubles.installed import need

REPOSITORY = Path(__file__).resolve().parents[2]
README_LINES_MAX = 110
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        REPOSITORY / "deploy" / "README.md",
        REPOSITORY / "examples" / "README.md",
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


def test_every_page_is_reached_from_the_readme() -> None:
    waiting, reached = [REPOSITORY / "README.md"], set[Path]()
    while waiting:
        page = waiting.pop()
        reached.add(page)
        targets = [
            (page.parent / link.partition("#")[0]).resolve()
            for link in LINK.findall(page.read_text())
        ]
        waiting += [each for each in PAGES if each in targets and each not in reached]
    assert set(PAGES) - reached == set()


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


def test_every_page_is_in_the_contents_of_the_site() -> None:
    """Else `make check` fails, by a warning that says less."""
    text = (REPOSITORY / "docs" / "index.md").read_text()
    named = set(re.findall(r"^/?[\w/-]+$", text, re.MULTILINE))
    pages = {page.stem for page in (REPOSITORY / "docs").glob("*.md")} - {"index"}
    assert pages - named == set()


def script_of_the_pages(name: str) -> ModuleType:
    """A module of docs/, which is no package."""
    spec = spec_from_file_location(name, REPOSITORY / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("page.html", '<script src="https://cdn.example/x.js"></script>'),
        ("page.html", '<link rel="stylesheet" href="//cdn.example/x.css">'),
        ("page.html", '<img alt="" src="http://example/x.png">'),
        ("deep/page.css", "@import url('https://fonts.example/css');"),
        ("deep/page.css", "src: url(https://fonts.example/a.woff2)"),
        ("picture.svg", '<image href="https://example/x.png"/>'),
    ],
)
def test_a_site_that_would_ask_another_host_is_refused(
    file: str, text: str, tmp_path: Path
) -> None:
    need("sphinx", "pip install sphinx")
    conf = script_of_the_pages("conf")
    page = tmp_path / file
    page.parent.mkdir(exist_ok=True)
    page.write_text('<a href="https://example">a link</a> <img src="_static/x.png">')
    conf.refuse_foreign_hosts(SimpleNamespace(outdir=tmp_path), None)
    page.write_text(text)
    with pytest.raises(Exception, match=f"{page.name} asks another host"):
        conf.refuse_foreign_hosts(SimpleNamespace(outdir=tmp_path), None)


def test_the_page_of_errors_is_that_of_the_code() -> None:
    written = script_of_the_pages("write_errors")
    page = (REPOSITORY / "docs" / "errors.md").read_text()
    (shown,) = written.TABLE.findall(page)
    assert shown.strip() == written.tables().strip(), "python docs/write_errors.py"
    assert {f"### {reason.name}" for reason in ErrorReason} == set(
        re.findall(r"^### \w+$", page, re.MULTILINE)
    )


def test_the_page_of_commands_has_every_exit_code() -> None:
    page = (REPOSITORY / "docs" / "commands.md").read_text()
    told = re.findall(r"^\| (\d+) \| \w", page, re.MULTILINE)
    assert [int(code) for code in told] == sorted(ExitCode)


def test_every_cause_of_a_slow_job_has_a_cure() -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(Cause)


def test_every_event_is_explained() -> None:
    page = (REPOSITORY / "docs" / "psctl.md").read_text()
    _, _, section = page.partition("\n### Events\n")
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(told) == sorted(EventKind)


def test_every_public_name_is_in_the_reference() -> None:
    page = (REPOSITORY / "docs" / "api.md").read_text()
    shown = set(re.findall(r"psworker\.(\w+)(?:\(\))?$", page, re.MULTILINE))
    errors = {name for name in psworker.__all__ if name.endswith("Error")}
    assert "errors" in shown
    assert set(psworker.__all__) - errors - shown == set()


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
