"""What the commands of `psctl` share: options, and where their words go."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

import typer

from pswire.addresses import Address
from pswire.options import peer_address

T = TypeVar("T")


CoordinatorOption = Annotated[
    Address,
    typer.Option(
        "--coordinator",
        parser=peer_address,
        metavar="HOST:PORT",
        envvar="PS_COORDINATOR",
        help="The job's coordinator.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON for programs, see docs/psctl.md.")
]


def parsed(option: str, parse: Callable[[], T]) -> T:
    """What an option says, or the end of the command with exit code 2."""
    try:
        return parse()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def print_json(value: object) -> None:
    """Data for programs, to stdout."""
    typer.echo(json.dumps(value, indent=2))


def say(text: str) -> None:
    """Progress for people, to stderr."""
    typer.echo(f"psctl: {text}", err=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the command with its exit code and without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted; every process that it had started is gone")
        raise typer.Exit(128 + signal.SIGINT) from None
