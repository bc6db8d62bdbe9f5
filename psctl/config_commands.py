"""The commands of `psctl config`."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from psctl.options import JsonOption, show
from psctl.tables import aligned
from pswire.config_file import (
    ConfigFileError,
    Setting,
    read_settings,
    variable_of,
)
from pswire.config_options import ConfigOption, ConfiguredGroup, Value, values_of
from pswire.names import shown_url
from pswire.options import choice_option
from pswire.security.credentials import TOKEN_VARIABLE

app = typer.Typer(
    no_args_is_help=True,
    help="Shows which settings hold, and who has said so.",
)

_ROLES: Final = ("coordinator", "shard", "local", "worker", "psctl")


@app.command("show")
def show_config(
    *,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- OPTIONS]...",
            help="With --role, options as the command of that role would be given.",
        ),
    ] = None,
    config: ConfigOption = None,
    role: Annotated[
        str | None,
        choice_option(
            _ROLES,
            help="All settings of this role; by default those of every role that "
            "somebody has set.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Shows each setting and its source: flag, variable, file or default.

    Example: psctl config show --config job.toml --role coordinator

    Checks the whole file. Tokens are never shown, only whether there is one.
    """
    if arguments and role is None:
        raise typer.BadParameter("say whose options these are", param_hint="--role")
    try:
        found = {
            each: _values(each, arguments or [], config)
            for each in _ROLES
            if role in (None, each)
        }
    except ConfigFileError as error:
        raise typer.BadParameter(str(error), param_hint="--config") from error
    if role is None:
        found = {
            name: [each for each in values if each.source != "default"]
            for name, values in found.items()
        }
    rows = [
        [name, value.key, _shown(value.value), value.source]
        for name, values in found.items()
        for value in values
    ]
    figures = {
        name: {
            value.key: {"value": _plain(value.value), "source": value.source}
            for value in values
        }
        for name, values in found.items()
    }
    heads = ["role", "setting", "value", "source"]
    text = aligned(heads, rows) if rows else "nothing is set: all settings are defaults"
    show(as_json, figures, text)


def _values(role: str, arguments: Sequence[str], path: Path | None) -> list[Value]:
    """Settings of a role; of `psctl`, what is set for any of its commands."""
    group, main_words = _group_of(role)
    found: dict[str, Value] = {}
    for words, command in group.leaves():
        is_main = words == main_words
        if not is_main and role != "psctl":
            continue
        settings: dict[str, Setting] = {}
        if path is not None:
            settings = read_settings(path, group.sections_of(words), group.known_keys())
        given = arguments if is_main else ()
        for each in values_of(command, given, settings):
            if is_main or each.source != "default":
                found.setdefault(each.key, each)
    if role == "worker":
        for each in _of_scripts(path):
            found.setdefault(each.key, each)
    if os.environ.get(TOKEN_VARIABLE):
        found["token"] = Value("token", "set", TOKEN_VARIABLE)
    return list(found.values())


def _group_of(role: str) -> tuple[ConfiguredGroup, tuple[str, ...]]:
    """The program of a role, and the words of its command that has most settings."""
    if role == "worker":
        from psworker.__main__ import app as program

        words = ("run",)
    elif role == "psctl":
        from psctl.__main__ import app as program

        words = ("status",)
    else:
        from psserver.__main__ import app as program

        words = (role,)
    group = typer.main.get_command(program)
    assert isinstance(group, ConfiguredGroup)
    return group, words


def _of_scripts(path: Path | None) -> Iterator[Value]:
    """What `psworker.connect()` takes, and `psworker run` has no option for."""
    from psworker.config import CONNECT_KEYS, TIMEOUTS_S, read_file

    filed = {} if path is None else read_file(path)
    for key in CONNECT_KEYS:
        if text := os.environ.get(variable_of(key)):
            yield Value(key, text, variable_of(key))
        elif key in filed:
            yield Value(key, *filed[key])
        else:
            yield Value(key, TIMEOUTS_S.get(key), "default")


def _plain(value: object) -> object:
    """For JSON: numbers and words as they are, all else as text."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return shown_url(str(value))  # of a store, with a password in it


def _shown(value: object) -> str:
    plain = _plain(value)
    if plain is None or plain == [] or plain == "":
        return "not set"
    if isinstance(plain, list):
        return " ".join(map(str, plain))
    return str(plain).lower() if isinstance(plain, bool) else str(plain)
