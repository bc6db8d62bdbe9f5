"""The command line itself: what it takes, refuses and says."""

import pytest
from typer.testing import CliRunner

from psctl.__main__ import app
from psctl.failures import CommandError
from pswire.exit_codes import ExitCode

RUN = CliRunner()


def test_commands_are_listed_and_others_are_refused() -> None:
    listed = RUN.invoke(app, ["--help"]).output
    for name in ("status", "top", "events", "doctor", "mode", "snapshot", "demo"):
        assert f"\n  {name} " in listed
    assert RUN.invoke(app, ["bogus"]).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["top"],
        ["events"],
        ["doctor", "--skip", "bogus"],
        ["snapshot", "list"],
        ["snapshot", "get", "--out", "x"],
        ["status", "--coordinator", "nowhere"],
        ["status", "--coordinator", "host:0"],
        ["demo", "--mode", "nonsense"],
        ["demo", "--workers", "0"],
        ["bench", "step", "--mib", "0"],
        ["mode"],
        ["mode", "nonsense", "--coordinator", "127.0.0.1:1"],
        ["mode", "ssp", "--timeout", "0", "--coordinator", "127.0.0.1:1"],
    ],
)
def test_wrong_use_is_exit_code_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PS_COORDINATOR", raising=False)
    assert RUN.invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    "command", ["status", "mode", "snapshot", "demo", "compare", "bench"]
)
def test_each_command_has_help(command: str) -> None:
    done = RUN.invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["bsp", "--staleness", "3"], "has no meaning in bsp"),
        (["asp", "--staleness", "0"], "only ssp bounds"),
    ],
)
def test_a_bound_that_does_not_go_with_the_mode_is_wrong_use(
    arguments: list[str], word: str
) -> None:
    done = RUN.invoke(app, ["mode", "--coordinator", "127.0.0.1:1", *arguments])
    assert isinstance(done.exception, CommandError)
    assert done.exception.exit_code == ExitCode.USAGE
    assert word in str(done.exception)
