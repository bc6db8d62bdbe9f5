"""The package as users get it: what the wheel holds, what the pins say."""

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pswire.limits import PROTOCOL_VERSION
from tests.doubles.installed import need
from tests.wheel_check import build, unpacked

REPOSITORY = Path(__file__).resolve().parents[2]

WITHOUT_MINIMA = {
    "ci",
    "dev",
    "lightning",
    "otel",
    "ray",
    "transformers",
    "tensorboard",
}
"""Extras that `make oldest` does not hold to their lowest versions: tools, and
frameworks, which `make integrations` runs at one version each."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    text = (REPOSITORY / "pyproject.toml").read_text()
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """A wheel built as a release would."""
    need("hatchling", "pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(build("wheel", REPOSITORY, folder)) as archive:
        yield archive


@pytest.fixture(scope="module")
def wheel_names(wheel: zipfile.ZipFile) -> set[str]:
    return set(wheel.namelist())


@pytest.fixture(scope="module")
def wheel_metadata(wheel: zipfile.ZipFile, wheel_names: set[str]) -> Message:
    (name,) = (name for name in wheel_names if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def pins(name: str) -> dict[str, str]:
    lines = (REPOSITORY / name).read_text().splitlines()
    named = [line.split(";")[0] for line in lines if line and not line.startswith("#")]
    return dict(line.strip().split("==") for line in named)


def test_wheel_holds_the_packages_with_their_types(
    wheel_names: set[str],
) -> None:
    for package in ("psserver", "psworker", "psctl", "pswire"):
        assert f"{package}/__init__.py" in wheel_names
        assert f"{package}/py.typed" in wheel_names
    for stub in ("push_pb2.py", "push_pb2.pyi", "parameter_service_pb2_grpc.pyi"):
        assert f"pswire/v1/{stub}" in wheel_names


def test_wheel_holds_nothing_else(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "psserver",
        "psworker",
        "psctl",
        "pswire",
    }


def test_wheel_holds_every_file_of_its_packages(wheel_names: set[str]) -> None:
    """Pages and types too, and not only modules."""
    listed = subprocess.run(
        ["git", "ls-files", *("psserver", "psworker", "psctl", "protos/pswire")],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    tracked = {name.removeprefix("protos/") for name in listed.stdout.splitlines()}
    assert "pswire/v1/push.proto" in tracked
    assert tracked - wheel_names == set()


def test_a_wheel_of_the_source_distribution_is_the_same(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    sdist = build("sdist", REPOSITORY, tmp_path / "sdist")
    source = unpacked(sdist, tmp_path / "source")
    assert (source / "tests" / "unit" / "test_packaging.py").exists()
    with zipfile.ZipFile(build("wheel", source, tmp_path / "wheel")) as again:
        for name in wheel.namelist():
            assert again.read(name) == wheel.read(name), name
        assert again.namelist() == wheel.namelist()


def test_wheel_says_what_it_is_and_under_which_licence(
    wheel: zipfile.ZipFile, wheel_names: set[str], wheel_metadata: Message
) -> None:
    assert wheel_metadata["License-Expression"] == "Apache-2.0"
    assert wheel_metadata["License-File"] == "LICENSE"
    (licence,) = (name for name in wheel_names if name.endswith("/LICENSE"))
    assert wheel.read(licence) == (REPOSITORY / "LICENSE").read_bytes()
    assert wheel_metadata["Author"]
    assert "parameter server" in wheel_metadata["Keywords"]
    assert wheel_metadata["Description-Content-Type"] == "text/markdown"
    shown = wheel_metadata.get_payload(decode=True)
    assert shown == (REPOSITORY / "README.md").read_bytes()


def test_every_extra_is_documented(project: dict[str, Any]) -> None:
    page = (REPOSITORY / "docs" / "install.md").read_text()
    told = set(re.findall(r"^\| `\[(\w+)\]` \|", page, re.M))
    assert told == set(project["optional-dependencies"]) - {"ci", "dev"}


def test_the_page_of_versions_names_the_versions_of_today(
    project: dict[str, Any],
) -> None:
    page = (REPOSITORY / "docs" / "versions.md").read_text()
    assert f"| package | {project['version']} |" in page
    assert f"| protocol | {PROTOCOL_VERSION} |" in page


def test_the_licence_is_the_whole_of_apache_2() -> None:
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    for section in range(1, 10):
        assert re.search(rf"^   {section}\. ", text, re.M), section
    assert "END OF TERMS AND CONDITIONS" in text


def test_every_classifier_is_one_that_an_index_knows(project: dict[str, Any]) -> None:
    need("trove_classifiers", "pip install trove-classifiers")
    from trove_classifiers import classifiers, deprecated_classifiers

    named = set(project["classifiers"])
    assert named <= set(classifiers) - set(deprecated_classifiers)


def test_commands_lead_to_functions() -> None:
    scripts = metadata.distribution("paramserver").entry_points
    assert {script.name for script in scripts} == {"psserver", "psworker", "psctl"}
    for script in scripts:
        assert callable(script.load())


def test_torch_is_pinned_by_its_version_alone() -> None:
    # A build tag, or an environment without a pin, makes pip fetch another build.
    assert pins("constraints.txt")["torch"] == "2.13.0"
    makefile = (REPOSITORY / "Makefile").read_text()
    assert "TORCH := torch==2.13.0\n" in makefile


def test_every_dependency_is_pinned(project: dict[str, Any]) -> None:
    names = pins("constraints.txt") | pins("constraints-integrations.txt")
    pinned = {re.sub("[-_.]+", "-", name).lower() for name in names}
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    asked = {re.split(r"[\s<>=!~;\[]", text)[0] for group in groups for text in group}
    assert asked - pinned == set()


def test_the_oldest_versions_are_those_that_the_package_allows(
    project: dict[str, Any],
) -> None:
    groups = [project["dependencies"]]
    for extra, group in project["optional-dependencies"].items():
        if extra not in WITHOUT_MINIMA:
            groups.append(group)
    named = [
        re.fullmatch(r"([\w-]+)>=([\d.]+)(?:[,;].*)?", text)
        for group in groups
        for text in group
    ]
    assert None not in named, "a requirement names no minimum"
    minima = {found[1]: found[2] for found in named if found is not None}
    oldest = pins("constraints-oldest.txt")
    assert oldest.keys() == minima.keys()
    for name, version in oldest.items():
        assert padded(version) == padded(minima[name]), name


def padded(version: str) -> tuple[int, ...]:
    """The three numbers of a version, of which pyproject.toml may leave out zeros."""
    numbers = [int(each) for each in version.split(".")]
    return (*numbers, 0, 0)[:3]


def test_classifiers_begin_with_the_oldest_python(project: dict[str, Any]) -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert f">={named[0]}" == project["requires-python"]
    assert named == sorted(named, key=padded)


def test_nothing_is_pinned_that_a_fresh_environment_lacks(
    project: dict[str, Any],
) -> None:
    """Not even where an older environment still has it."""
    makefile = (REPOSITORY / "Makefile").read_text()
    rule = makefile[makefile.index("\n.venv/installed:") :].partition("\n\n")[0]
    (extras,) = re.findall(r"--editable '\.\[(.+)\]'", rule)
    (tools,) = re.findall(r"\(PIP_FLAGS\) ([\w ]+) --constraint", rule)
    groups = [tools.split(), project["dependencies"]]
    groups += [project["optional-dependencies"][extra] for extra in extras.split(",")]
    waiting = [(Requirement(text), "") for group in groups for text in group]
    needed: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": extra}):
            for each in {(name, ""), *((name, extra) for extra in requirement.extras)}:
                if each not in needed:
                    needed.add(each)
                    texts = metadata.requires(name) or ()
                    waiting += [(Requirement(text), each[1]) for text in texts]
    pinned = {canonicalize_name(name) for name in pins("constraints.txt")}
    assert pinned - {name for name, _ in needed} == set(), "nothing requires these"


def test_the_environment_is_the_pinned_one() -> None:
    if Path(sys.prefix).name != ".venv":
        pytest.skip(f"{sys.prefix} is not the environment of constraints.txt")
    installed = {
        name: metadata.version(name).partition("+")[0]
        for name in pins("constraints.txt")
    }
    assert installed == pins("constraints.txt")
