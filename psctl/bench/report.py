"""The figures of `psctl bench all` as text, JSON and a table for a page."""

import json
import math
import shlex
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psctl.bench.figures import Ratio, Spread, WorkloadFigures
from psctl.bench.machine import machine, machine_text, versions
from psctl.bench.workload import WARM_UP_COUNT, Sizes
from psctl.tables import aligned

SCHEMA_VERSION: Final = 1

JSON_FILE: Final = "bench.json"
TABLE_FILE: Final = "bench.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All that was measured, and where.

    Attributes:
        commit: Commit of the checkout that ran, `None` when it is no checkout.
        files: What was written where.
    """

    arguments: tuple[str, ...]
    commit: str | None
    sizes: Sizes
    figures: tuple[WorkloadFigures, ...]
    files: tuple[Path, ...] = ()


def checkout_commit(folder: Path) -> str | None:
    """The commit of a folder under git, with `-dirty` when files differ from it.

    `None` for a folder that isn't in a repository, or when git is not installed.
    """
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def report_json(report: BenchReport) -> dict[str, object]:
    """The report for programs, see docs/psctl.md."""
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "all",
        "command": shlex.join(report.arguments),
        "commit": report.commit,
        "machine": machine(),
        "versions": versions(),
        "sizes": report.sizes.to_json(),
        "warm_up_count": WARM_UP_COUNT,
        "workloads": [_workload_json(each) for each in report.figures],
        "files": [str(path) for path in report.files],
    }


def _workload_json(figures: WorkloadFigures) -> dict[str, object]:
    workload = figures.workload
    return {
        "name": workload.name,
        "title": workload.title,
        "member_count": workload.member_count,
        "thread_count": workload.thread_count,
        "took_s": round(figures.took_s, 1),
        "link": figures.link or None,
        "failure": figures.failure or None,
        "contenders": [
            {
                "name": entry.name,
                "text": entry.text,
                "why_not": figures.why_not(entry.name) or None,
                "spread": figures.spread_of(entry.name),
                "per_s": _rounded(
                    1 / statistics.median(durations_s) if durations_s else None
                ),
                "durations_ms": [round(1000 * each, 4) for each in durations_s],
            }
            for entry in workload.entries
            for durations_s in [figures.durations_s.get(entry.name, ())]
        ],
        "targets": [_ratio_json(ratio) for ratio in figures.ratios],
    }


def _ratio_json(ratio: Ratio) -> dict[str, object]:
    target = ratio.target
    return {
        "text": target.text,
        "contender": target.contender,
        "baseline": target.baseline,
        "quantity": target.quantity,
        "bound": target.bound,
        "limit": target.limit,
        "ratio": _rounded(ratio.measured),
        "ratio_quartiles": None
        if ratio.measured is None
        else [_rounded(ratio.low), _rounded(ratio.high)],
        "is_met": ratio.is_met,
        "why_not": ratio.why_not or None,
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


def short(number: float) -> str:
    """A number from 0 with three digits that count, and never with an exponent."""
    if number >= 100 or number == 0:
        return f"{number:.0f}"
    return f"{number:.{2 - math.floor(math.log10(number))}f}"


def spread_table(spreads: Mapping[str, Spread | None]) -> str:
    """Durations under each other; a row of `-` for what was not measured."""
    rows = [
        (name, *["-"] * 5)
        if of is None
        else (
            name,
            short(of["median_ms"]),
            short(of["min_ms"]),
            short(of["max_ms"]),
            short(of["interquartile_ms"]),
            short(1000 / of["median_ms"]) if of["median_ms"] else "-",
        )
        for name, of in spreads.items()
    ]
    header = ("", "MEDIAN MS", "MIN", "MAX", "IQR", "PER S")
    return aligned(header, rows, right=header[1:])


def workload_text(figures: WorkloadFigures) -> str:
    workload = figures.workload
    parts = [f"{workload.name.upper()}: {workload.title}"]
    if figures.link:
        parts.append(f"link: {figures.link}")
    if figures.failure:
        return "\n\n".join([*parts, f"not measured: {figures.failure}"])
    spreads = {entry.name: figures.spread_of(entry.name) for entry in workload.entries}
    parts.append(spread_table(spreads))
    if workload.targets:
        parts.append("\n".join(ratio_text(ratio) for ratio in figures.ratios))
    unable = [f"{name} did not run: {why}" for name, why in figures.cannot.items()]
    return "\n\n".join([*parts, *unable])


def ratio_text(ratio: Ratio) -> str:
    """Whether a target was met, in a line."""
    if ratio.measured is None:
        return f"not measured: {ratio.target.text} ({ratio.why_not})"
    verdict = "met" if ratio.is_met else "MISSED"
    return (
        f"{verdict}: {ratio.measured:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), "
        f"target {ratio.target.text}"
    )


def _circumstances(report: BenchReport) -> str:
    count, wanted = report.sizes.repetition_count, Sizes().repetition_count
    few = "" if count >= wanted else f" (targets are for {wanted} and more)"
    return (
        f"{machine_text()}, commit {report.commit or 'unknown'}, {count} repetitions"
        f"{few}"
    )


def report_text(report: BenchReport) -> str:
    parts = [
        _circumstances(report),
        *map(workload_text, report.figures),
        "MS is of one thing, the median. Ratios are of medians; in brackets the "
        "quartiles of the\nratios within repetitions.",
    ]
    if report.files:
        parts.append("written:\n" + "\n".join(f"    {path}" for path in report.files))
    return "\n\n".join(parts)


def report_table(report: BenchReport) -> str:
    lines = [
        f"{_circumstances(report)}. Ratios are of medians, of what the target names.",
        "",
        "| workload | median ms | ratio (quartiles) | target | |",
        "|---|---|---|---|---|",
    ]
    for figures in report.figures:
        medians = ", ".join(
            f"{entry.name} " + ("-" if spread is None else short(spread["median_ms"]))
            for entry in figures.workload.entries
            for spread in [figures.spread_of(entry.name)]
        )
        if not figures.workload.targets:
            lines.append(f"| `{figures.workload.name}` | {medians} | - | none | |")
        for ratio in figures.ratios:
            measured, verdict = "-", f"not measured: {ratio.why_not}"
            if ratio.measured is not None:
                measured = f"{ratio.measured:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
                verdict = "met" if ratio.is_met else "missed"
            lines.append(
                f"| `{figures.workload.name}` | {medians} | {measured} | "
                f"{ratio.target.text} | {verdict} |"
            )
    return "\n".join(lines)


def write_report(report: BenchReport, folder: Path) -> None:
    text = json.dumps(report_json(report), indent=2)
    (folder / JSON_FILE).write_text(text + "\n", encoding="utf-8")
    (folder / TABLE_FILE).write_text(report_table(report) + "\n", encoding="utf-8")
