"""The `psctl` command line. What a command needs is imported when it runs."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from pswire.addresses import Address, parse_address
from pswire.exit_codes import ExitCode
from pswire.versions import version_text
from psworker.ctl.failures import report

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
snapshot_app = typer.Typer(no_args_is_help=True, help="Pull snapshots of a job.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure paramserver here.")
app.add_typer(snapshot_app, name="snapshot")
app.add_typer(bench_app, name="bench")

T = TypeVar("T")

_DEBUG_VARIABLE: Final = "PSCTL_DEBUG"


def _coordinator(text: str) -> Address:
    try:
        address = parse_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if address.port == 0:
        raise typer.BadParameter("port 0 is for listening; name the port it took")
    return address


CoordinatorOption = Annotated[
    Address,
    typer.Option(
        "--coordinator",
        parser=_coordinator,
        metavar="HOST:PORT",
        envvar="PS_COORDINATOR",
        help="The job's coordinator.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON for programs, see docs/psctl.md.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_text())
        raise typer.Exit(ExitCode.DONE)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _progress(text: str) -> None:
    typer.echo(f"psctl: {text}", err=True)


def _parsed(option: str, parse: Callable[[], T]) -> T:
    """What an option says, or the end of the command with exit code 2."""
    try:
        return parse()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _progress("interrupted; every process that it had started is gone")
        raise typer.Exit(128 + signal.SIGINT) from None


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


@app.command()
def status(*, coordinator: CoordinatorOption, as_json: JsonOption = False) -> None:
    """Shows where a job stands: phase, whom it waits for, shards, workers, lag.

    Example: psctl status --coordinator localhost:7070
    """
    from psworker.ctl.status import read_status, status_json, status_text

    found = read_status(coordinator)
    if as_json:
        _print_json(status_json(coordinator, found))
    else:
        typer.echo(status_text(found))


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

    with _interruptible():
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
    ] = 28_160,
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
        modes=_parsed("--modes", lambda: parse_modes(modes, workers)),
        loads=_parsed("--loads", lambda: parse_loads(loads)),
        worker_count=workers,
        sample_count=samples,
        base_ms=base_ms,
        target_accuracy=target,
        seed=seed,
        snapshot_interval_s=snapshot_interval,
        out=out,
    )
    with _interruptible():
        comparison = run_comparison(settings, _progress)
    if as_json:
        _print_json(comparison_json(comparison))
    else:
        typer.echo(comparison_text(comparison))


@snapshot_app.command("get")
def snapshot_get(
    *,
    coordinator: CoordinatorOption,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", dir_okay=False, help="Where to write, as safetensors."
        ),
    ],
    newer_than: Annotated[
        int | None,
        typer.Option(min=0, metavar="VERSION", help="Wait for a version above this."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which model, where the job has several."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Longest wait.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Writes a snapshot to a file that loads into the plain model.

    Example: psctl snapshot get --out model.safetensors

    The file has one version of all parameters and appears whole or not at all.
    """
    from psworker.ctl.snapshots import get_snapshot

    _progress(f"asking {coordinator} for a snapshot")
    saved = get_snapshot(
        coordinator, out, newer_than=newer_than, model=model, timeout_s=timeout
    )
    if as_json:
        _print_json(saved)
    else:
        typer.echo(
            f"version {saved['version']} (clock {saved['clock']}) is in {saved['path']}"
        )


@snapshot_app.command("list")
def snapshot_list(
    *, coordinator: CoordinatorOption, as_json: JsonOption = False
) -> None:
    """Lists the snapshots the job holds: in this release the newest one.

    Example: psctl snapshot list --json
    """
    from psworker.ctl.snapshots import list_snapshots, listing_text

    listing = list_snapshots(coordinator)
    if as_json:
        _print_json(listing)
    else:
        typer.echo(listing_text(listing))


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
        _print_json(found.to_json())
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

    with _interruptible():
        figures = bench_step(mib, repetitions, _progress)
    if as_json:
        _print_json(figures)
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
