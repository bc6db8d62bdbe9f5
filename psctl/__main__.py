"""The `psctl` command line. What a command needs is imported when it runs."""

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from psctl import (
    bench_commands,
    job_commands,
    local_commands,
)
from psctl.failures import report
from psctl.options import JsonOption, print_json, say
from pswire.exit_codes import ExitCode
from pswire.options import VersionOption

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
app.command()(job_commands.status)
app.command()(job_commands.mode)
app.command()(local_commands.demo)
app.command()(local_commands.compare)
app.add_typer(job_commands.snapshot_app, name="snapshot")
app.add_typer(bench_commands.app, name="bench")

_DEBUG_VARIABLE: Final = "PSCTL_DEBUG"


@app.callback()
def psctl(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help=f"Show tracebacks of errors, as {_DEBUG_VARIABLE}=1 does."
        ),
    ] = False,
    version: VersionOption = False,
) -> None:
    """Asks things of a paramserver job, and shows what one does.

    Exit codes: 0 done, 1 error, 2 usage, 69 peer unavailable, 70 internal,
    75 try again, 76 incompatible version, 78 bad configuration.
    """
    if debug:
        os.environ[_DEBUG_VARIABLE] = "1"


@app.command("check-history")
def check_history_command(
    *,
    histories: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|FOLDER...",
            exists=True,
            help="Histories of one job, or folders with nothing else in them.",
            show_default=False,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Checks by its histories whether a job kept its promises.

    Example: psctl check-history runs/monday/

    Exit code 1 when a promise was broken, 75 when histories were still being written
    meanwhile, so that a break may come from that: check again when the job has ended.

    Start the processes with --history FOLDER/,
    or with PS_HISTORY, to have histories; see docs/history.md.
    """
    from psctl.check_history import check_history

    found = check_history(histories)
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(found.to_text())
    if found.still_written:
        say(found.still_written_text)
    if found.exit_code != ExitCode.DONE:
        raise typer.Exit(found.exit_code)


def main() -> None:
    """Entry point of the `psctl` command."""
    try:
        app()
    except Exception as error:
        debug = os.environ.get(_DEBUG_VARIABLE, "0") not in ("", "0")
        sys.exit(report(error, debug=debug))


if __name__ == "__main__":
    main()
