"""Options of commands whose values are refused in words of ours, not of a parser."""

import functools
import inspect
import os
import platform
from collections.abc import Callable, Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from pswire.addresses import Address, parse_address
from pswire.exit_codes import ExitCode
from pswire.limits import QUORUM_DEFAULT, STALENESS_BOUND_DEFAULT
from pswire.logs import FORMATS, LOG_DIR_VARIABLE, LOG_FORMAT_VARIABLE
from pswire.membership import BOUNDED_MODES, QUORUM_MODES, Mode
from pswire.number_range import NumberRange
from pswire.security.credentials import (
    TLS_CA_VARIABLE,
    TLS_CERTIFICATE_VARIABLE,
    TLS_KEY_VARIABLE,
    TOKEN_FILE_VARIABLE,
    Credentials,
    CredentialsError,
)

Choice = TypeVar("Choice", bound=str)

*_FIRST, _LAST = (f"{mode.rules.summary} ({mode.label})" for mode in Mode)
MODES_TEXT: Final = f"{', '.join(_FIRST)}, or {_LAST}"
"""How workers keep together, in the order of the modes."""

STALENESS_HELP: Final = (
    f"With {BOUNDED_MODES}, clocks that a worker may be ahead of the slowest one; "
    f"{STALENESS_BOUND_DEFAULT} by default."
)
QUORUM_HELP: Final = (
    f"With {QUORUM_MODES}, pushes that close a clock; {QUORUM_DEFAULT} by default. "
    "Fewer do where fewer workers have data. A later push counts in the next clock."
)
GRACE_WINDOW_HELP: Final = (
    f"With {QUORUM_MODES}, how long a clock that could close waits for more pushes; "
    "shorter where a worker that trains on meanwhile would have to wait for it. 0 by "
    "default."
)


def number_option(
    *names: str,
    allowed: NumberRange,
    metavar: str = "N",
    help: str,
    **others: Any,  # noqa: ANN401, as typer takes them
) -> Any:  # noqa: ANN401, as typer returns it
    """An option that takes a number."""

    def parse(given: str | float) -> float:
        try:
            return allowed.parsed(str(given))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return typer.Option(*names, parser=parse, metavar=metavar, help=help, **others)


def count_option(
    help: str,
    *,
    most: int,
    least: int = 1,
    **others: Any,  # noqa: ANN401, as typer's
) -> Any:  # noqa: ANN401, as typer returns it
    """An option that takes how many there are, from `least` to `most`."""
    return number_option(allowed=NumberRange(least, most), help=help, **others)


def listen_address(text: str) -> Address:
    """An address, of which port 0 is any free one.

    Raises:
        typer.BadParameter: It is none.
    """
    try:
        return parse_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def peer_address(text: str) -> Address:
    """An address to connect to.

    Raises:
        typer.BadParameter: It is none.
    """
    address = listen_address(text)
    if address.port == 0:
        raise typer.BadParameter("port 0 is for listening; name the port it took")
    return address


def choice_option(
    choices: Collection[str],
    *,
    help: str,
    **others: Any,  # noqa: ANN401, as typer takes them
) -> Any:  # noqa: ANN401, as typer returns it
    """An option that takes one of some words."""
    return typer.Option(
        parser=lambda text: chosen(choices, text),
        metavar="|".join(choices),
        help=help,
        **others,
    )


def chosen(choices: Collection[Choice], text: str) -> Choice:
    """The choice that a word stands for, in capitals or not.

    Raises:
        typer.BadParameter: It stands for none.
    """
    for each in choices:
        if each == text.lower():
            return each
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(choices)}")


_CREDENTIAL_OPTIONS: Final = {
    "tls_ca": (
        TLS_CA_VARIABLE,
        "The job's authority, in PEM: whoever is called or calls must show a "
        "certificate of it. Switches TLS on.",
    ),
    "tls_cert": (
        TLS_CERTIFICATE_VARIABLE,
        "The certificate of this process, in PEM, as `psctl tls init` makes them.",
    ),
    "tls_key": (
        TLS_KEY_VARIABLE,
        "Its private key, in PEM, which no other user may read.",
    ),
    "token_file": (
        TOKEN_FILE_VARIABLE,
        "The token that calls show, as `psctl token create` makes them; no other user "
        "may read it. Read again when it changes.",
    ),
}
"""Variable and help of each option that says what a process proves itself with."""


def takes_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of what this process proves itself with.

    They set the variables of this process, which those that it starts inherit.
    """

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:  # noqa: ANN401, as typer passes them
        for name, (variable, _) in _CREDENTIAL_OPTIONS.items():
            path = arguments.pop(name)
            if path is not None:
                # Read again later, when the process may be in another folder.
                os.environ[variable] = str(path.absolute())
        try:
            Credentials.from_environment()
        except CredentialsError as error:
            raise typer.BadParameter(str(error)) from error
        command(**arguments)

    declare_options(
        wrapped,
        command,
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    Path | None,
                    typer.Option(metavar="FILE", envvar=variable, help=text),
                ],
            )
            for name, (variable, text) in _CREDENTIAL_OPTIONS.items()
        ],
    )
    return wrapped


_LOG_OPTIONS: Final = {
    "log_format": (
        LOG_FORMAT_VARIABLE,
        str | None,
        choice_option(
            FORMATS,
            envvar=LOG_FORMAT_VARIABLE,
            help="How lines of the log look: text for people, JSON for programs. By "
            "default text on a terminal and JSON elsewhere.",
        ),
    ),
    "log_dir": (
        LOG_DIR_VARIABLE,
        Path | None,
        typer.Option(
            metavar="FOLDER",
            envvar=LOG_DIR_VARIABLE,
            help="Where to keep logs too, at most 32 MiB of each process, for `psctl "
            "logs`.",
        ),
    ),
}


def takes_log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that say how it logs, and where.

    They set the variables of this process, which those that it starts inherit.
    """

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:  # noqa: ANN401, as typer passes them
        for name, (variable, *_) in _LOG_OPTIONS.items():
            given = arguments.pop(name)
            if given is not None:
                given = given.absolute() if isinstance(given, Path) else given
                os.environ[variable] = str(given)
        command(**arguments)

    declare_options(
        wrapped,
        command,
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind, option],
            )
            for name, (_, kind, option) in _LOG_OPTIONS.items()
        ],
    )
    return wrapped


def declare_options(
    wrapped: Callable[..., None],
    command: Callable[..., None],
    options: Sequence[inspect.Parameter],
    *,
    replaced: str = "",
) -> None:
    """Tells typer that a command takes more options than its function.

    Args:
        wrapped: Takes them, and calls the command's function without them.
        command: The command's function.
        options: What it takes more.
        replaced: The parameter of the command's function that `wrapped` makes of them.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [*(each for each in own if each.name != replaced), *options]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    del wrapped.__wrapped__  # type: ignore[attr-defined]


def _show_version(wanted: bool) -> None:
    """Shows our version and those of what we depend on most, without importing them."""
    if wanted:
        packages = ("paramserver", "torch", "grpcio", "protobuf")
        installed = [f"{name} {metadata.version(name)}" for name in packages]
        typer.echo(", ".join([*installed, f"Python {platform.python_version()}"]))
        raise typer.Exit(ExitCode.DONE)


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Show versions."
    ),
]
"""`--version`, of every command."""
