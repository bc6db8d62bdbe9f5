"""The commands of `psctl tls`."""

from pathlib import Path
from typing import Annotated

import typer

from psctl.options import JsonOption, show
from pswire.number_range import NumberRange
from pswire.options import count_option, number_option

app = typer.Typer(
    no_args_is_help=True,
    help="Makes, renews and lists the certificates of a job.",
)

FolderArgument = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Folder of the job's certificates."),
]


@app.command("init")
def init_command(
    folder: FolderArgument,
    *,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME]...",
            help="A machine that runs a coordinator or shards: the names and addresses "
            "by which others call it. Once for each machine.",
        ),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="A worker that gets a certificate for this id alone; can be repeated. "
            "By default all workers share one, for any id.",
        ),
    ] = None,
    days: Annotated[
        int, count_option("Days that a certificate holds.", most=3650)
    ] = 365,
    as_json: JsonOption = False,
) -> None:
    """Makes an authority, and a certificate for each role and machine.

    Example: psctl tls init certificates --host ps0.example.org,10.0.0.7

    Copy a folder of DIR to the machine whose process it is for, and name its files:
    --tls-ca ca.pem --tls-cert cert.pem --tls-key key.pem. The folder `authority` stays.
    What is there already is left as it is, so that a later call adds machines and
    workers.
    """
    from psctl.tls import certificates_json, init, made_text, subjects_of

    made, kept = init(folder, subjects_of(host or (), worker or ()), days)
    show(
        as_json,
        certificates_json(folder, made, kept_count=len(kept)),
        made_text(folder, made, len(kept)),
    )


@app.command("renew")
def renew_command(
    folder: FolderArgument,
    *,
    within: Annotated[
        float,
        number_option(
            allowed=NumberRange(0.0, 36_500.0),
            metavar="DAYS",
            help="Replace those that end within so many days.",
        ),
    ] = 30.0,
    all_of_them: Annotated[
        bool, typer.Option("--all", help="Replace all of them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Replaces certificates that end soon, in their folders.

    Example: psctl tls renew certificates

    Copy them to their machines again, over the former ones: daemons, workers and
    readers take them for new connections without a restart.
    """
    from psctl.tls import certificates_json, made_text, renew

    made, kept_count = renew(folder, None if all_of_them else within)
    show(
        as_json,
        certificates_json(folder, made, kept_count=kept_count),
        made_text(folder, made, kept_count),
    )


@app.command("show")
def show_command(folder: FolderArgument, *, as_json: JsonOption = False) -> None:
    """Lists certificates: role, names and end of each.

    Example: psctl tls show certificates
    """
    from psctl.tls import certificates_json, certificates_text, listed

    found = listed(folder)
    show(as_json, certificates_json(folder, found), certificates_text(found))
