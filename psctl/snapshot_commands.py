"""The commands of `psctl snapshot`."""

from pathlib import Path
from typing import Annotated

import typer

from psctl.options import CoordinatorOption, JsonOption, print_json
from pswire.limits import NUMBER_MAX, WAIT_S_MAX
from pswire.names import printable
from pswire.number_range import NumberRange
from pswire.options import number_option

app = typer.Typer(no_args_is_help=True, help="Pulls snapshots of a job.")


@app.command("get")
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


@app.command("list")
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
