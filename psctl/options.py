"""What the commands of `psctl` share: options, and where their words go."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeVar

import typer

from pswire.addresses import Address
from pswire.limits import GRACE_WINDOW_MS_MAX, STALENESS_BOUND_MAX, WORKER_COUNT_MAX
from pswire.number_range import NumberRange
from pswire.options import (
    GRACE_WINDOW_HELP,
    QUORUM_HELP,
    STALENESS_HELP,
    number_option,
    peer_address,
)

T = TypeVar("T")

_COORDINATOR: Final = typer.Option(
    "--coordinator",
    parser=peer_address,
    metavar="HOST:PORT",
    help="The job's coordinator.",
)
CoordinatorOption = Annotated[Address, _COORDINATOR]
OptionalCoordinatorOption = Annotated[Address | None, _COORDINATOR]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON for programs, see docs/psctl.md.")
]
StalenessOption = Annotated[
    int | None,
    number_option(
        allowed=NumberRange(0, STALENESS_BOUND_MAX), metavar="S", help=STALENESS_HELP
    ),
]

QuorumOption = Annotated[
    int | None,
    number_option(
        allowed=NumberRange(1, WORKER_COUNT_MAX), metavar="K", help=QUORUM_HELP
    ),
]
GraceWindowOption = Annotated[
    float | None,
    number_option(
        allowed=NumberRange(0.0, GRACE_WINDOW_MS_MAX / 1000, unit="seconds"),
        metavar="SECONDS",
        help=GRACE_WINDOW_HELP,
    ),
]


def timeout_option(most_s: float) -> Any:  # noqa: ANN401, as typer returns it
    return number_option(
        allowed=NumberRange(0.1, most_s, unit="seconds"),
        metavar="SECONDS",
        help="Longest wait.",
    )


def parsed(option: str, parse: Callable[[], T]) -> T:
    """What an option says, or the end of the command with exit code 2."""
    try:
        return parse()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def show(as_json: bool, figures: object, text: str) -> None:
    """Results, to stdout: as JSON for programs or as text for people."""
    typer.echo(json.dumps(figures, indent=2) if as_json else text)


def say(text: str) -> None:
    """Progress for people, to stderr."""
    typer.echo(f"psctl: {text}", err=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the command with its exit code and without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted; every process that it had started has ended")
        raise typer.Exit(128 + signal.SIGINT) from None
