"""What every command promises: it starts without torch, and knows its versions."""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from psctl.__main__ import app as psctl_app
from psctl.failures import exit_code_of
from psserver.__main__ import app as psserver_app
from pswire.config_file import key_of, variable_of
from pswire.exit_codes import ExitCode
from psworker.__main__ import app as psworker_app

COMMANDS = ["psserver", "psworker", "psctl"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_import_torch(command: str) -> None:
    # As the installed script does, but telling afterwards what it loaded.
    program = f"""
import sys
from {command}.__main__ import main
sys.argv = ["command", "--help"]
try:
    main()
finally:
    slow = [name for name in ("torch", "sklearn", "scipy") if name in sys.modules]
    print("LOADED", slow, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    assert "LOADED []" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_version_names_what_is_installed(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", command, "--version"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for package in ("paramserver", "torch", "grpcio", "protobuf"):
        assert f"{package} " in done.stdout


def helps(app: typer.Typer, command: Any, *names: str) -> Iterator[str]:  # noqa: ANN401
    """The help of a command and of all below it, as a terminal of 80 columns has it."""
    yield CliRunner().invoke(app, [*names, "--help"], terminal_width=80).output
    for below, each in getattr(command, "commands", {}).items():
        yield from helps(app, each, *names, below)


@pytest.mark.parametrize("app", [psserver_app, psworker_app, psctl_app])
def test_no_text_of_a_help_is_cut_or_broken_within_a_word(app: typer.Typer) -> None:
    texts = list(helps(app, typer.main.get_command(app)))

    assert len(texts) > 1
    for text in texts:
        assert text.startswith("Usage: ")
        _, _, listed = text.partition("\nCommands:\n")
        assert "..." not in listed
        assert not re.search(r"\w-$", text, re.MULTILINE)
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("app", "line"),
    [
        (psserver_app, "bogus"),
        (psserver_app, "local --bogus"),
        (psserver_app, "local --shards=1 --listen=nowhere"),
        (psserver_app, "local --shards=0"),
        (psserver_app, "local --shards=1 --listen=0.0.0.0:0"),
        (psserver_app, "local --shards=1 --listen=0.0.0.0:0 --insecure"),
        (psserver_app, "local --shards=2 --history=one.file"),
        (psserver_app, "coordinator --shards=1 --staleness=3"),
        (psserver_app, "coordinator --shards=1 --lease-ttl=0.1"),
        (psserver_app, "coordinator --shards=1 --lease-ttl=nan"),
        (psserver_app, "shard --coordinator=127.0.0.1:1 --threads=0"),
        (psserver_app, "shard --coordinator=127.0.0.1:0"),
        (psworker_app, "bogus"),
        (psworker_app, "run"),
        (psworker_app, "run --coordinator=127.0.0.1:1 -- no_such_script.py"),
        (psworker_app, "run --nproc=0 -- -m this"),
        (psctl_app, "bogus"),
        (psctl_app, "status --coordinator=nowhere"),
        (psctl_app, "mode bsp --staleness=3 --coordinator=127.0.0.1:1"),
        (psctl_app, "mode sometimes --coordinator=127.0.0.1:1"),
        (psctl_app, "snapshot get --coordinator=127.0.0.1:1 --out=model.pt"),
        (psctl_app, "snapshot get --coordinator=127.0.0.1:1 --out=no/such/model"),
        (psctl_app, "snapshot get --checkpoint=no/such --out=model.safetensors"),
        (psctl_app, "snapshot get --checkpoint=. --newer-than=3 --out=m.safetensors"),
        (psctl_app, "checkpoint list"),
        (psctl_app, "checkpoint list --checkpoint-dir=no/such"),
        (psctl_app, "checkpoint show ../x --checkpoint-dir=."),
        (psctl_app, "checkpoint prune --keep=0 --checkpoint-dir=."),
        (psctl_app, "checkpoint export --to=dcp --out=. --checkpoint-dir=."),
        (psctl_app, "checkpoint export --to=pt --out=x --checkpoint-dir=."),
        (
            psctl_app,
            "checkpoint export --to=state_dict --out=m.safetensors --checkpoint-dir=.",
        ),
        (psctl_app, "demo --kill=nobody@3"),
        (psctl_app, "demo --out=model.pt"),
        (psctl_app, "compare --modes=sometimes"),
        (psctl_app, "compare --out=no/such/folder"),
        (psctl_app, "bench bogus"),
        (psctl_app, "check-history no_such_history"),
    ],
)
def test_a_wrong_option_ends_every_command_with_the_same_code(
    tmp_path: Path, app: typer.Typer, line: str
) -> None:
    words = line.split()
    if app is psserver_app and len(words) > 1:
        words.append(f"--state-dir={tmp_path}")
    ended = CliRunner().invoke(app, words)
    error = ended.exception
    code = (
        exit_code_of(error)
        if error is not None and not isinstance(error, SystemExit)
        else ended.exit_code
    )
    assert code == ExitCode.USAGE, (ended.output, error)


def number_options(app: typer.Typer) -> Iterator[tuple[list[str], str]]:
    """Names of a command and one of its options that take a number, of all commands."""
    for each in app.registered_commands:
        assert each.callback is not None
        name = each.name or each.callback.__name__
        for argument, hint in get_type_hints(each.callback).items():
            if {int, float} & {hint, *get_args(hint)}:
                yield [name], f"--{argument.replace('_', '-')}"
    for group in app.registered_groups:
        assert group.typer_instance is not None
        for names, option in number_options(group.typer_instance):
            yield [str(group.name), *names], option


command_of = cache(typer.main.get_command)

NUMBER_OPTIONS = [
    (app, names, option)
    for app in (psserver_app, psworker_app, psctl_app)
    for names, option in number_options(app)
]


def test_all_commands_with_numbers_were_found() -> None:
    assert len(NUMBER_OPTIONS) >= 40
    found = {(*names, option) for _, names, option in NUMBER_OPTIONS}
    assert ("run", "--nproc") in found
    assert ("coordinator", "--lease-ttl") in found
    assert ("bench", "all", "--mib") in found


@pytest.mark.parametrize(("app", "names", "option"), NUMBER_OPTIONS)
def test_a_number_that_is_none_is_refused_in_one_form(
    app: typer.Typer, names: list[str], option: str
) -> None:
    for text in ("abc", "", "-1", "nan", "inf", "9" * 30):
        with pytest.raises(typer.BadParameter) as caught:
            command_of(app).main([*names, f"{option}={text}"], standalone_mode=False)

        shown = repr(text) if text in ("abc", "") else text
        variable = variable_of(key_of(option))
        said = (
            rf"Invalid value for '{option}' \(env var: '{variable}'\): "
            f"{shown} is not a (whole )?number"
        )
        assert caught.value.exit_code == ExitCode.USAGE
        assert re.match(
            rf"{said}( of \w+)? from [\d.e-]+ to [\d.e+-]+",
            caught.value.format_message(),
        )
