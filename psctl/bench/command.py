"""`psctl bench all`, from the first workload to the last file."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from psctl.bench import picture
from psctl.bench.figures import WorkloadFigures
from psctl.bench.measuring import measure_workload
from psctl.bench.report import (
    JSON_FILE,
    TABLE_FILE,
    BenchReport,
    checkout_commit,
    ratio_text,
    write_report,
)
from psctl.bench.workload import Sizes, Workload
from psctl.compare.picture import NOT_INSTALLED, can_draw
from psctl.folders import made_folder, scratch_folder
from psctl.processes import signals_interrupt


def bench_all(
    workloads: Sequence[Workload],
    sizes: Sizes,
    *,
    out: Path,
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> BenchReport:
    """Measures workloads one after the other.

    Args:
        workloads: Which.
        sizes: How much of each.
        out: Folder for the files; made if new.
        arguments: The command line, for the report.
        say: Called with progress for people.

    Raises:
        CommandError: The folder can't be made.
        KeyboardInterrupt: Stopped by a signal; every process has ended by then.
    """
    folder = made_folder(out)
    if not can_draw():
        say(NOT_INSTALLED)
    report = BenchReport(
        arguments=tuple(arguments),
        commit=checkout_commit(Path(__file__).parent),
        sizes=sizes,
        figures=(),
    )
    with signals_interrupt():
        for number, workload in enumerate(workloads, start=1):
            say(f"[{number}/{len(workloads)}] {workload.name}: {workload.title}")
            with scratch_folder("paramserver-bench-") as scratch:
                measured = measure_workload(workload, sizes, scratch)
            _say_figures(measured, say)
            # At once, so that Ctrl-C loses only what is under way.
            report = _written(report, measured, folder)
    return report


def _written(
    report: BenchReport, measured: WorkloadFigures, folder: Path
) -> BenchReport:
    """The report with another workload, as it is in the files now."""
    figures = (*report.figures, measured)
    files = [folder / JSON_FILE, folder / TABLE_FILE]
    if can_draw():
        files.append(picture.draw(figures, folder))
    report = replace(report, figures=figures, files=tuple(files))
    write_report(report, folder)
    return report


def _say_figures(figures: WorkloadFigures, say: Callable[[str], None]) -> None:
    name = figures.workload.name
    if figures.failure:
        say(f"{name} was not measured: {figures.failure}")
        return
    for contender, why in figures.cannot.items():
        say(f"{name}: {contender} did not run: {why}")
    for ratio in figures.ratios:
        say(f"{name}: {ratio_text(ratio)}")
