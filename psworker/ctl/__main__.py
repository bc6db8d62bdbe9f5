"""The `psctl` command line. What a command needs is imported when it runs."""

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from pswire.exit_codes import ExitCode
from pswire.versions import version_text
from psworker.cores import usable_core_count
from psworker.ctl import job_commands, local_commands, snapshot_commands
from psworker.ctl.failures import report
from psworker.ctl.options import JsonOption, interruptible, print_json, say

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure paramserver here.")
app.command()(job_commands.status)
app.command()(job_commands.mode)
app.command()(local_commands.demo)
app.command()(local_commands.compare)
app.add_typer(snapshot_commands.app, name="snapshot")
app.add_typer(bench_app, name="bench")

_DEBUG_VARIABLE: Final = "PSCTL_DEBUG"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_text())
        raise typer.Exit(ExitCode.DONE)


@app.callback()
def psctl(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", envvar=_DEBUG_VARIABLE, help="Show tracebacks of errors."
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show versions."
        ),
    ] = False,
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
    """Checks from what a job's processes wrote down whether it kept its promises.

    Example: psctl check-history runs/monday/

    Exit code 1 when a promise was broken, 75 when histories were still being written
    meanwhile, so that a break may come from that: check again when the job has ended.

    Start the processes with --history FOLDER/,
    or with PS_HISTORY, to have histories; see docs/history.md.
    """
    from psworker.ctl.check_history import check_history

    found = check_history(histories)
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(found.to_text())
    if found.still_written:
        say(found.still_written_text)
    if found.exit_code != ExitCode.DONE:
        raise typer.Exit(found.exit_code)


@bench_app.command("step")
def bench_step_command(
    *,
    mib: Annotated[
        int, typer.Option(min=1, max=1024, help="Size of the parameter, in MiB.")
    ] = 64,
    repetitions: Annotated[
        int, typer.Option(min=2, help="Measured steps of each side.")
    ] = 15,
    as_json: JsonOption = False,
) -> None:
    """Measures push + apply + pull on loopback, beside torch.distributed.rpc.

    Example: psctl bench step --mib 64 --json
    """
    from psworker.ctl.bench.step import bench_step, bench_text

    with interruptible():
        figures = bench_step(mib, repetitions, say)
    if as_json:
        print_json(figures)
    else:
        typer.echo(bench_text(figures))


@bench_app.command("overlap")
def bench_overlap_command(
    *,
    parameters: Annotated[
        int, typer.Option(min=1, metavar="N", help="Parameters, about.")
    ] = 25_000_000,
    batch: Annotated[
        int, typer.Option(min=1, help="Samples of a worker's step.")
    ] = 256,
    workers: Annotated[int, typer.Option(min=1, max=2, help="Workers.")] = 1,
    shards: Annotated[int, typer.Option(min=1, max=16, help="Shards.")] = 2,
    turns: Annotated[
        int, typer.Option(min=2, help="Measured turns of each contender.")
    ] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 4,
    bandwidth: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="MBIT",
            help="Puts a link of this speed, in Mbit/s, before the shards; 0 for none.",
        ),
    ] = 0,
    latency: Annotated[
        float, typer.Option(min=0, metavar="MS", help="Of that link, one way.")
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of torch in each worker; by default all cores but one, which is left "
            "to those who send.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measures what prepare(overlap=True) gains, beside one process.

    Example: psctl bench overlap --bandwidth 1000 --latency 0.2 --json
    """
    from psworker.ctl.bench.overlap import (
        OverlapSettings,
        bench_overlap,
        overlap_text,
    )

    settings = OverlapSettings(
        parameter_count=parameters,
        batch_size=batch,
        worker_count=workers,
        shard_count=shards,
        turn_count=turns,
        step_count=steps,
        bandwidth_mbit=bandwidth,
        latency_ms=latency,
        thread_count=threads or max(1, usable_core_count() - 1),
    )
    with interruptible():
        figures = bench_overlap(settings, say)
    if as_json:
        print_json(figures)
    else:
        typer.echo(overlap_text(figures))


@bench_app.callback()
def bench() -> None:
    """Measure paramserver on this machine."""


def main() -> None:
    """Entry point of the `psctl` command."""
    try:
        app()
    except Exception as error:
        debug = bool(os.environ.get(_DEBUG_VARIABLE))
        sys.exit(report(error, debug=debug))


if __name__ == "__main__":
    main()
