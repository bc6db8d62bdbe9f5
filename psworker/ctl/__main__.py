"""The `psctl` command line. What a command needs is imported when it runs."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from pswire.exit_codes import ExitCode
from pswire.versions import version_text
from psworker.ctl import job_commands, snapshot_commands
from psworker.ctl.failures import report
from psworker.ctl.options import JsonOption, interruptible, parsed, print_json, say

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure paramserver here.")
app.command()(job_commands.status)
app.command()(job_commands.mode)
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


class DemoData(StrEnum):
    """Data sets of the demo."""

    DIGITS = "digits"
    MNIST5K = "mnist5k"


def _mode(text: str) -> str:
    if text in ("ssp", "asp"):
        raise typer.BadParameter(
            f"{text} is not in this release; bsp is", param_hint="--mode"
        )
    if text != "bsp":
        raise typer.BadParameter(f"{text!r} is no mode; bsp is", param_hint="--mode")
    return text


@app.command()
def demo(
    *,
    data: Annotated[
        DemoData, typer.Option(help="What to train on: both are real data.")
    ] = DemoData.DIGITS,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Workers.")] = 3,
    shards: Annotated[int, typer.Option(min=1, max=64, help="Shards.")] = 2,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs; by default about ten seconds of them."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(parser=_mode, metavar="bsp", help="How workers keep together."),
    ] = "bsp",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="File or folder for the snapshot; ./paramserver-demo.safetensors by "
            "default.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Trains a real model on real data with a whole job on this machine.

    Example: psctl demo --data mnist5k --workers 4

    Needs no network beyond loopback. Ctrl-C ends it and leaves nothing behind.
    """
    from psworker.ctl.demo.command import run_demo

    with interruptible():
        report_text = run_demo(
            data.value,
            worker_count=workers,
            shard_count=shards,
            epoch_count=epochs,
            out=out,
        )
    typer.echo(report_text)


@app.command()
def compare(
    *,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Workers.")] = 4,
    samples: Annotated[
        int,
        typer.Option(min=1, help="Samples in updates, the same for each mode."),
    ] = 25_600,
    modes: Annotated[
        str,
        typer.Option(metavar="LIST", help="Any of bsp, bsp+B, ssp:S and asp."),
    ] = "bsp,bsp+1,ssp:3,asp",
    loads: Annotated[
        str,
        typer.Option(metavar="LIST", help="Any of hiccups, straggler and even."),
    ] = "hiccups,straggler",
    base_ms: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="MS",
            help="How long an undisturbed step takes; by default 100, or more where "
            "that is not long against the step's own work.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        float,
        typer.Option(min=0, max=1, help="Accuracy whose time is told."),
    ] = 0.9,
    seed: Annotated[int, typer.Option(help="Seed of data and delays.")] = 1,
    snapshot_interval: Annotated[
        float,
        typer.Option(min=0.05, metavar="SECONDS", help="Between points of the curve."),
    ] = 1.0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for CSV files and picture.")
    ] = Path("paramserver-compare"),
    as_json: JsonOption = False,
) -> None:
    """Shows what each mode is good for: BSP, backup workers, SSP and ASP side by side.

    Example: psctl compare --modes bsp,ssp:3,ssp:8 --loads hiccups

    Trains the convolutional network of `psctl demo` once for each mode and load, with
    workers whose steps are waits of a set length, hiccups and stragglers among them.
    Takes about 8 minutes as it is. docs/modes.md tells what to expect and why.
    """
    from psworker.ctl.compare.command import CompareSettings, run_comparison
    from psworker.ctl.compare.loads import parse_loads
    from psworker.ctl.compare.modes import parse_modes
    from psworker.ctl.compare.report import comparison_json, comparison_text

    settings = CompareSettings(
        modes=parsed("--modes", lambda: parse_modes(modes, workers)),
        loads=parsed("--loads", lambda: parse_loads(loads)),
        worker_count=workers,
        sample_count=samples,
        base_ms=base_ms,
        target_accuracy=target,
        seed=seed,
        snapshot_interval_s=snapshot_interval,
        out=out,
    )
    with interruptible():
        comparison = run_comparison(settings, say)
    if as_json:
        print_json(comparison_json(comparison))
    else:
        typer.echo(comparison_text(comparison))


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

    Exit code 1 when a promise was broken. Start the processes with --history FOLDER/,
    or with PS_HISTORY, to have histories; see docs/history.md.
    """
    from psworker.ctl.check_history import check_history

    found = check_history(histories)
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(found.to_text())
    if not found.is_clean:
        raise typer.Exit(ExitCode.ERROR)


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
