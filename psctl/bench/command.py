"""Runs workloads: the processes of each, what its members report, and the files."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from psctl.bench import picture
from psctl.bench.figures import Spread, WorkloadFigures, slowest, spread
from psctl.bench.machine import free_port
from psctl.bench.report import (
    JSON_FILE,
    TABLE_FILE,
    BenchReport,
    checkout_commit,
    ratio_text,
    write_report,
)
from psctl.bench.workload import (
    WARM_UP_COUNT,
    CannotRunError,
    Ground,
    Sizes,
    Workload,
)
from psctl.compare.picture import NOT_INSTALLED, can_draw
from psctl.failures import CommandError
from psctl.folders import made_folder, scratch_folder
from psctl.processes import STOP_TIMEOUT_S, Children, signals_interrupt

SILENCE_S_MAX: Final = 120.0
"""Time without a line of any member after which a workload counts as stuck."""

_POLL_S: Final = 0.2


def measure_alone(workload: Workload, sizes: Sizes) -> dict[str, Spread]:
    """Measures a workload for a command of its own; the spread of each contender."""
    with signals_interrupt(), scratch_folder("paramserver-bench-") as scratch:
        measured = measure_workload(workload, sizes, scratch)
    for entry in workload.entries:
        if why := measured.why_not(entry.name):
            raise CommandError(why)
    return {
        entry.name: spread(measured.durations_s[entry.name])
        for entry in workload.entries
    }


def measure_workload(
    workload: Workload, sizes: Sizes, scratch: Path
) -> WorkloadFigures:
    """Measures a workload; one that fails says why in its figures.

    Its files are in `scratch`, an empty folder.
    """
    began = time.monotonic()
    link_text = ""
    try:
        with ExitStack() as stack:
            link = stack.enter_context(workload.link())
            link_text = link.text if link else ""
            children = stack.enter_context(
                Children(scratch, prefix=link.prefix if link else ())
            )
            ground = Ground(children, scratch, sizes, workload.environment, link)
            names = _start(workload, ground)
            durations_s, cannot = _listen(children, names)
        failure = ""
    except (CommandError, CannotRunError) as error:
        durations_s, cannot, failure = {}, {}, str(error)
    return WorkloadFigures(
        workload=workload,
        durations_s=durations_s,
        cannot=cannot,
        failure=failure,
        link=link_text,
        took_s=time.monotonic() - began,
    )


def _start(workload: Workload, ground: Ground) -> list[str]:
    """Starts everything; the names of the members among the children."""
    settings = {
        "sizes": ground.sizes.to_json(),
        "places": workload.start(ground),
        "member_count": workload.member_count,
        "thread_count": workload.thread_count,
        "group_port": free_port(),
        "warm_up_count": WARM_UP_COUNT,
    }
    names = [f"member {rank}" for rank in range(workload.member_count)]
    for rank, name in enumerate(names):
        ground.start(
            name,
            *(workload.member_module, workload.name, str(rank), json.dumps(settings)),
        )
    return names


def _listen(
    children: Children, names: list[str]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Reads what members report until all have ended well.

    By contender, of each repetition the time of the slowest member, and by contender
    that can't run why.
    """
    seconds: dict[str, dict[str, list[float]]] = {
        name: defaultdict(list) for name in names
    }
    cannot: dict[str, str] = {}
    running = set(names)
    heard = time.monotonic()
    while running:
        line = children.next_line(_POLL_S)
        if line is not None and line.child in seconds:
            heard = time.monotonic()
            if line.text is None:
                running.remove(line.child)
                children.wait_ended(line.child, STOP_TIMEOUT_S)
            elif line.text.startswith("{"):  # Gloo greets its peers on stdout.
                message = json.loads(line.text)
                if "cannot" in message:
                    cannot[message["cannot"]] = message["why"]
                else:
                    of_member = seconds[line.child]
                    of_member[message["contender"]].append(message["seconds"])
        children.check(names=())
        if time.monotonic() - heard > SILENCE_S_MAX:
            tails = "\n".join(f"{name}: {children.log_tail(name)}" for name in names)
            raise CommandError(
                f"no member said anything for {SILENCE_S_MAX:.0f} s, so the workload "
                f"was ended; the ends of their logs:\n{tails}"
            )
    durations_s = {
        contender: slowest([of_member[contender] for of_member in seconds.values()])
        for contender in seconds[names[0]]
    }
    return durations_s, cannot


def bench_all(
    workloads: Sequence[Workload],
    sizes: Sizes,
    *,
    out: Path,
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> BenchReport:
    """Measures workloads one after the other, and writes the files into a folder."""
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
