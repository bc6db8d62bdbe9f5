"""The commands of `psctl` that look at a job, or change it, while it runs."""

from enum import StrEnum
from typing import Annotated

import typer

from psctl.options import CoordinatorOption, JsonOption, print_json, say
from pswire.limits import STALENESS_BOUND_DEFAULT, STALENESS_BOUND_MAX
from pswire.number_range import NumberRange
from pswire.options import chosen, number_option


class ModeName(StrEnum):
    """How workers keep together."""

    BSP = "bsp"
    SSP = "ssp"
    ASP = "asp"


def status(*, coordinator: CoordinatorOption, as_json: JsonOption = False) -> None:
    """Shows where a job stands: phase, whom it waits for, lead.

    Example: psctl status --coordinator localhost:7070
    """
    from psctl.status import read_status, status_json, status_text

    found = read_status(coordinator)
    if as_json:
        print_json(status_json(coordinator, found))
    else:
        typer.echo(status_text(found))


def mode(
    name: Annotated[
        ModeName,
        typer.Argument(
            parser=lambda text: chosen(ModeName, text),
            metavar="bsp|ssp|asp",
            help="In lockstep, a bounded number of clocks apart, or freely.",
            show_default=False,
        ),
    ],
    *,
    coordinator: CoordinatorOption,
    staleness: Annotated[
        int | None,
        number_option(
            allowed=NumberRange(0, STALENESS_BOUND_MAX),
            metavar="S",
            help="With ssp, clocks that a worker may be ahead of the slowest one; "
            f"{STALENESS_BOUND_DEFAULT} by default.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float,
        number_option(
            allowed=NumberRange(0.1, 3600.0, unit="seconds"),
            metavar="SECONDS",
            help="Longest wait.",
        ),
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Changes how workers keep together, while they train.

    Example: psctl mode ssp --staleness 3

    Prints after which clock the mode rules, and the generation that it begins. After
    the time-out the change is still wanted, and comes when nothing stands in its way.

    From bsp to ssp or asp, divide the learning rate by the number of workers and leave
    momentum out, and the reverse on the way back: see docs/modes.md.
    """
    from psctl.mode import changed_text, rate_hint, set_mode
    from pswire.membership import Mode

    changed = set_mode(
        coordinator, Mode[name.name], staleness=staleness, timeout_s=timeout
    )
    if as_json:
        print_json(changed)
    else:
        typer.echo(changed_text(changed))
    hint = rate_hint(changed)
    if hint:
        say(hint)
