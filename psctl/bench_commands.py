"""The commands of `psctl` that measure paramserver on this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from psctl.options import JsonOption, interruptible, parsed, say, show
from pswire.exit_codes import ExitCode
from pswire.number_range import NumberRange
from pswire.options import count_option, number_option
from psworker.launch.cores import usable_core_count

app = typer.Typer(
    no_args_is_help=True,
    help="Measures paramserver beside what others have.",
)

ParametersOption = Annotated[
    int, count_option("Parameters of the model, about.", most=1_000_000_000)
]
BatchOption = Annotated[
    int, count_option("Samples of a worker's training step.", most=1_000_000)
]


@app.command("all")
def bench_all_command(
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Measure this workload alone; can be repeated."
        ),
    ] = None,
    repetitions: Annotated[
        int,
        count_option(
            "Measured repetitions of each contender.", most=1_000_000, least=2
        ),
    ] = 15,
    mib: Annotated[
        int, count_option("Size of the big parameter, in MiB.", most=1024)
    ] = 64,
    parameters: ParametersOption = 25_000_000,
    batch: BatchOption = 256,
    calls: Annotated[
        int,
        count_option("Small steps and empty calls of a repetition.", most=1_000_000),
    ] = 50,
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="For JSON, table and picture."),
    ] = Path("paramserver-bench"),
    as_json: JsonOption = False,
) -> None:
    """Measures every workload beside what people would use instead.

    Example: psctl bench all --only exchange --only shards

    The contenders of a workload take turns within one run, so that whatever else the
    machine does slows all of them alike. Sizes other than the default ones are for
    trying things out: targets are set for the defaults. `psctl bench list` shows the
    workloads, and about how long each takes.
    """
    from psctl.bench.command import bench_all
    from psctl.bench.report import report_json, report_text
    from psctl.bench.suite import WORKLOADS, workload_named
    from psctl.bench.workload import Sizes

    names = only or [each.name for each in WORKLOADS]
    workloads = parsed("--only", lambda: [workload_named(name) for name in names])
    sizes = Sizes(
        mebibyte_count=mib,
        parameter_count=parameters,
        batch_size=batch,
        call_count=calls,
        repetition_count=repetitions,
    )
    with interruptible():
        report = bench_all(
            workloads,
            sizes,
            out=out,
            arguments=("psctl", *sys.argv[1:]),
            say=say,
        )
    show(as_json, report_json(report), report_text(report))
    if any(each.failure for each in report.figures):
        raise typer.Exit(ExitCode.ERROR)


@app.command("list")
def bench_list_command(*, as_json: JsonOption = False) -> None:
    """Lists the workloads of `psctl bench all`.

    What each measures, beside what, its targets, and about how long it takes.
    """
    from psctl.bench.suite import WORKLOADS, workloads_json, workloads_text

    show(as_json, workloads_json(WORKLOADS), workloads_text(WORKLOADS))


@app.command("step")
def bench_step_command(
    *,
    mib: Annotated[int, count_option("Size of the parameter, in MiB.", most=1024)] = 64,
    repetitions: Annotated[
        int, count_option("Measured steps of each side.", most=1_000_000, least=2)
    ] = 15,
    as_json: JsonOption = False,
) -> None:
    """Measures push + apply + pull, beside torch.distributed.rpc.

    Example: psctl bench step --mib 64 --json
    """
    from psctl.bench.alone import bench_step, step_text

    with interruptible():
        figures = bench_step(mib, repetitions, say)
    show(as_json, figures, step_text(figures))


@app.command("large")
def bench_large_command(
    *,
    mib: Annotated[
        int, count_option("Size of the model, in MiB.", most=1 << 20)
    ] = 3072,
    as_json: JsonOption = False,
) -> None:
    """Saves and restores a large model with Adam, and its memory.

    Example: psctl bench large --mib 3072

    One shard alone. With Adam it is three times the model, and twice that while it
    saves: 3 GiB take 18 GiB of memory, and 9 GiB where temporary files are.
    """
    from psctl.bench.alone import bench_large, large_text

    with interruptible():
        figures = bench_large(mib, say)
    show(as_json, figures, large_text(figures))


@app.command("overlap")
def bench_overlap_command(
    *,
    parameters: ParametersOption = 25_000_000,
    batch: BatchOption = 256,
    workers: Annotated[int, count_option("Workers.", most=2)] = 1,
    shards: Annotated[int, count_option("Shards.", most=16)] = 2,
    turns: Annotated[
        int,
        count_option("Measured turns of each contender.", most=1_000_000, least=2),
    ] = 9,
    steps: Annotated[int, count_option("Steps of a turn.", most=1_000_000)] = 4,
    bandwidth: Annotated[
        float,
        number_option(
            allowed=NumberRange(0.0, 1e6),
            metavar="MBIT",
            help="Puts a link of this speed, in Mbit/s, before the shards; 0 for none.",
        ),
    ] = 0,
    latency: Annotated[
        float,
        number_option(
            allowed=NumberRange(0.0, 60_000.0),
            metavar="MS",
            help="Of that link, one way.",
        ),
    ] = 0,
    threads: Annotated[
        int | None,
        count_option(
            "Of torch in each worker; by default all cores but one, which is left to "
            "the threads that send.",
            most=1024,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measures what prepare(overlap=True) gains, beside one process.

    Example: psctl bench overlap --bandwidth 1000 --latency 0.2 --json
    """
    from psctl.bench.alone import OverlapSettings, bench_overlap, overlap_text

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
    show(as_json, figures, overlap_text(figures))
