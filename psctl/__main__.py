"""The `psctl` command line. What a command needs is imported when it runs."""

import os
import sys
from typing import Annotated, ClassVar, Final

import typer

from psctl import (
    bench_commands,
    checkpoint_commands,
    config_commands,
    job_commands,
    local_commands,
    tls_commands,
    token_commands,
)
from psctl.failures import report
from pswire.config_options import ConfiguredGroup
from pswire.options import VersionOption


class Commands(ConfiguredGroup):
    """All commands: they share one section of the job's file."""

    sections: ClassVar = {"": ("job", "psctl")}


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(job_commands.status)
app.command()(job_commands.mode)
app.command()(job_commands.trace)
app.command()(job_commands.top)
app.command()(job_commands.events)
app.command()(job_commands.doctor)
app.command()(job_commands.logs)
app.command()(local_commands.demo)
app.command()(local_commands.compare)
app.command("check-history")(job_commands.check_history)
app.command()(job_commands.replay)
app.add_typer(job_commands.snapshot_app, name="snapshot")
app.add_typer(checkpoint_commands.app, name="checkpoint")
app.add_typer(tls_commands.app, name="tls")
app.add_typer(token_commands.app, name="token")
app.add_typer(bench_commands.app, name="bench")
app.add_typer(config_commands.app, name="config")

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
    """Looks at a paramserver job, changes its mode, and shows what a job does.

    Exit codes: 0 done, 1 error, 2 usage, 69 peer unavailable, 70 internal,
    75 try again, 76 incompatible version, 78 bad configuration.
    """
    if debug:
        os.environ[_DEBUG_VARIABLE] = "1"


def main() -> None:
    try:
        app()
    except Exception as error:
        debug = os.environ.get(_DEBUG_VARIABLE, "0") not in ("", "0")
        sys.exit(report(error, debug=debug))


if __name__ == "__main__":
    main()
