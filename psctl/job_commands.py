"""The commands of `psctl` that look at a job, or change it, while it runs."""

from pathlib import Path
from typing import Annotated

import typer

from psctl.options import CoordinatorOption, JsonOption, print_json, say
from pswire.limits import (
    NUMBER_MAX,
    STALENESS_BOUND_DEFAULT,
    STALENESS_BOUND_MAX,
    WAIT_S_MAX,
)
from pswire.membership import Mode
from pswire.names import printable
from pswire.number_range import NumberRange
from pswire.options import chosen, number_option


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
        str,
        typer.Argument(
            parser=lambda text: chosen(Mode.labels(), text),
            metavar="|".join(Mode.labels()),
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

    changed = set_mode(
        coordinator, Mode.labelled(name), staleness=staleness, timeout_s=timeout
    )
    if as_json:
        print_json(changed)
    else:
        typer.echo(changed_text(changed))
    hint = rate_hint(changed)
    if hint:
        say(hint)


snapshot_app = typer.Typer(no_args_is_help=True, help="Pulls snapshots of a job.")


@snapshot_app.command("get")
def snapshot_get(
    *,
    coordinator: CoordinatorOption,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Where to write, as safetensors; the endings of other formats, such "
            "as .pt, are refused.",
        ),
    ],
    newer_than: Annotated[
        int | None,
        number_option(
            allowed=NumberRange(0, NUMBER_MAX),
            metavar="VERSION",
            help="Wait for a version above this.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which model, where the job has several."),
    ] = None,
    timeout: Annotated[
        float,
        number_option(
            allowed=NumberRange(0.1, WAIT_S_MAX, unit="seconds"),
            metavar="SECONDS",
            help="Longest wait.",
        ),
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Writes a snapshot to a file that loads into the plain model.

    Example: psctl snapshot get --out model.safetensors

    The file has one version of all parameters and appears whole or not at all.
    """
    from psctl.snapshots import get_snapshot

    saved = get_snapshot(
        coordinator, out, newer_than=newer_than, model=model, timeout_s=timeout
    )
    if as_json:
        print_json(saved)
    else:
        typer.echo(
            f"version {saved['version']} (clock {saved['clock']}) is in "
            f"{printable(saved['path'])}"
        )


@snapshot_app.command("list")
def snapshot_list(
    *, coordinator: CoordinatorOption, as_json: JsonOption = False
) -> None:
    """Lists the snapshots the job holds: in this release the newest one.

    Example: psctl snapshot list --json
    """
    from psctl.snapshots import list_snapshots, listing_text

    listing = list_snapshots(coordinator)
    if as_json:
        print_json(listing)
    else:
        typer.echo(listing_text(listing))
