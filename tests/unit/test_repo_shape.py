"""Limits on the shape of the code, which no linter of ours checks."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARIES = ("protos", "psserver", "psworker", "psctl")
FUNCTION_LINES_MAX = 70
TEST_TIMEOUT_S_MAX = 300
SOAK_TIMEOUT_S_MAX = 2400
LONG = {"clusters", "soak"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
# Written in two halves, so that this file does not hold what it looks for.
REGISTRY_HOSTS = [
    host + ".org"
    for host in ("pypi", "files.pythonhosted", "registry.npmjs", "download.pytorch")
]
MACHINE_PATHS = re.compile(r"(?<![\w./-])/" + r"(?:work|root|home)/")


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (REPOSITORY / name for name in listed.stdout.split("\0") if name)
    return sorted(path for path in paths if path.is_file())


def modules(*folders: str) -> list[Path]:
    return [
        path
        for path in tracked_files()
        if path.suffix == ".py"
        and "_pb2" not in path.name
        and path.relative_to(REPOSITORY).parts[0] in folders
    ]


def functions(
    tree: ast.Module,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_line_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Text of every file that git knows or would take."""
    found = {}
    for path in tracked_files():
        try:
            found[name_of(path)] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"{name_of(path)}:{function.lineno} {function.name}: {count} lines"
        for path in modules(*LIBRARIES, "tests", "examples")
        for function in functions(ast.parse(path.read_text()))
        if (count := body_line_count(function)) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_modules_are_named_for_what_they_define() -> None:
    vague = [
        name_of(path)
        for path in modules(*LIBRARIES, "tests")
        if VAGUE_NAMES.intersection([path.stem, *path.parent.parts])
    ]
    assert vague == []


def test_no_test_may_take_long() -> None:
    generous = [
        f"{name_of(path)}:{node.lineno}"
        for path in modules("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "pytest.mark.timeout"
        and not (
            node.args
            and isinstance(node.args[0], ast.Constant)
            and float(str(node.args[0].value))
            <= (
                SOAK_TIMEOUT_S_MAX
                if LONG.intersection(path.parts)
                else TEST_TIMEOUT_S_MAX
            )
        )
    ]
    assert generous == []


def test_nothing_depends_on_the_machine_it_was_written_on(
    texts: dict[str, str],
) -> None:
    machine_bound = [
        f"{name}: {found.group()}"
        for name, text in texts.items()
        if (found := MACHINE_PATHS.search(text))
    ]
    assert machine_bound == []


def test_package_registries_are_the_users_choice(texts: dict[str, str]) -> None:
    named = [
        f"{name}: {host}"
        for name, text in texts.items()
        for host in REGISTRY_HOSTS
        if host in text
    ]
    assert named == []


def test_what_a_visitor_looks_for_is_there(texts: dict[str, str]) -> None:
    for name in ("README.md", "CHANGELOG.md"):
        assert texts[name].startswith("# "), f"{name} has no title"


def test_wall_clocks_decide_nothing() -> None:
    """G16: they may jump. Only a token ends by them, as others can not say when."""
    wall_clock = re.compile(
        r"\btime\.time(_ns)?\(|\bdatetime\b.*\b(now|utcnow|today)\("
    )
    users = {
        path.relative_to(REPOSITORY).as_posix()
        for path in modules(*LIBRARIES)
        if wall_clock.search(path.read_text())
    }
    # For people, in a history, in the manifest of a checkpoint and in events, and in
    # `psctl logs --since`; and for the ends of tokens and certificates, which
    # `pswire/security/certificates.py` compares, too.
    # `psctl doctor` compares the clocks themselves, and a trace has the time of day.
    assert users == {
        "psctl/doctor/checks.py",
        "psctl/job_commands.py",
        "psctl/tls.py",
        "psctl/tokens.py",
        "protos/pswire/history.py",
        "psserver/coordinator/host/checkpoint_saver.py",
        "psserver/coordinator/host/coordinator_host.py",
        "psserver/coordinator/rpc/public_control.py",
        "psserver/edge/access.py",
        "psserver/edge/probe.py",
        "psworker/transport/probe_client.py",
    }
