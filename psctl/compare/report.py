"""The comparison as text, JSON and CSV."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psctl.bench.machine import machine, versions
from psctl.compare.figures import Figures
from psctl.compare.loads import Load
from psctl.compare.modes import ComparedMode
from psctl.compare.ratios import SHARE_MAX, SHARE_MIN, Ratio
from psctl.tables import aligned

SCHEMA_VERSION: Final = 1

RUNS_FILE: Final = "compare.csv"
CURVE_FILE: Final = "accuracy.csv"
STALENESS_FILE: Final = "staleness.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """What to compare.

    Attributes:
        sample_count: Samples in updates, of each run.
        base_ms: Time of an undisturbed step, `None` to choose it.
        target_accuracy: Accuracy whose time is reported.
    """

    modes: tuple[ComparedMode, ...]
    loads: tuple[Load, ...]
    worker_count: int
    sample_count: int
    base_ms: float | None
    target_accuracy: float
    seed: int
    snapshot_interval_s: float
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that was measured.

    Attributes:
        base_s: Time of an undisturbed step.
        base_reason: Why it is so long.
    """

    settings: CompareSettings
    shard_count: int
    sample_count: int
    base_s: float
    base_reason: str
    figures: tuple[Figures, ...]
    ratios: tuple[Ratio, ...]
    files: tuple[Path, ...]


def comparison_text(comparison: Comparison) -> str:
    parts = [
        f"{comparison.settings.worker_count} workers, {comparison.shard_count} shards, "
        f"{comparison.sample_count} samples in updates for each run, seed "
        f"{comparison.settings.seed}\n"
        f"an undisturbed step takes {comparison.base_s * 1000:.0f} ms:\n"
        f"{comparison.base_reason}"
    ]
    for load in dict.fromkeys(each.conditions.load for each in comparison.figures):
        parts.append(
            f"{load.upper()}: {load.description}\n\n{_table(comparison, load)}"
        )
        ratios = [each for each in comparison.ratios if each.conditions.load is load]
        if ratios:
            parts.append(_ratio_table(ratios))
    parts.append(
        "DROPPED counts samples. COST is what a step took, in undisturbed steps. "
        "STALENESS is\nthe mean (the largest), in updates. EXPECTED follows from the "
        "drawn delays alone, LIMIT\nfrom a run without end. A ratio of "
        f"{SHARE_MIN:g} to {SHARE_MAX:g} of EXPECTED, with an accuracy within a\n"
        "point of BSP's, is as expected. docs/modes.md tells where these come from."
    )
    parts.append("written:\n" + "\n".join(f"    {path}" for path in comparison.files))
    return "\n\n".join(parts)


def _table(comparison: Comparison, load: Load) -> str:
    header = (
        *("MODE", "STEPS/S", "SAMPLES/S", "DROPPED", "COST", "TIME"),
        *(f"TO {comparison.settings.target_accuracy:g}", "ACCURACY", "STALENESS"),
    )
    rows = [
        (
            each.conditions.mode.label,
            f"{each.steps_per_s:.1f}",
            f"{each.samples_per_s:.0f}",
            f"{each.dropped_sample_count}",
            f"{each.step_cost:.2f}",
            f"{each.duration_s:.1f} s",
            "never" if each.target_s is None else f"{each.target_s:.1f} s",
            f"{each.final_accuracy:.3f}",
            f"{each.staleness_mean:.1f} ({each.staleness_max})",
        )
        for each in comparison.figures
        if each.conditions.load is load
    ]
    return aligned(header, rows, right=header[1:])


def _ratio_table(ratios: Sequence[Ratio]) -> str:
    header = (
        *("SAMPLES/S OVER BSP'S", "MEASURED", "EXPECTED", "LIMIT"),
        *("ACCURACY", "VERDICT"),
    )
    rows = [
        (
            each.conditions.mode.label,
            f"{each.measured:.2f}",
            f"{each.expected:.2f}",
            f"{each.limit:.2f}",
            f"{each.accuracy_difference:+.3f}",
            each.verdict,
        )
        for each in ratios
    ]
    return aligned(header, rows, right=header[1:-1])


def comparison_json(comparison: Comparison) -> dict[str, object]:
    """The comparison for programs, see docs/psctl.md."""
    return {
        **head("compare"),
        "worker_count": comparison.settings.worker_count,
        "shard_count": comparison.shard_count,
        "sample_count": comparison.sample_count,
        "seed": comparison.settings.seed,
        "base_ms": round(comparison.base_s * 1000, 3),
        "target_accuracy": comparison.settings.target_accuracy,
        "runs": [
            {
                **_run_row(each),
                "staleness_counts": {
                    str(staleness): count
                    for staleness, count in each.staleness_counts.items()
                },
            }
            for each in comparison.figures
        ],
        "ratios_to_bsp": [
            {
                "load": each.conditions.load.value,
                "mode": each.conditions.mode.name,
                "measured": round(each.measured, 4),
                "expected": round(each.expected, 4),
                "limit": round(each.limit, 4),
                "accuracy_difference": round(each.accuracy_difference, 4),
                "verdict": each.verdict,
            }
            for each in comparison.ratios
        ],
        "files": [str(path) for path in comparison.files],
    }


def head(benchmark: str) -> dict[str, object]:
    """What the JSON of every comparison begins with."""
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        "machine": machine(),
        "versions": versions(),
    }


def write_tables(figures: Sequence[Figures], folder: Path) -> list[Path]:
    curve = [
        {
            **_key(each),
            "seconds": round(point.at_s, 3),
            "accuracy": round(point.accuracy, 4),
        }
        for each in figures
        for point in each.curve
    ]
    staleness = [
        {**_key(each), "staleness": staleness, "gradients": count}
        for each in figures
        for staleness, count in each.staleness_counts.items()
    ]
    return [
        write_rows(folder / RUNS_FILE, [_run_row(each) for each in figures]),
        write_rows(folder / CURVE_FILE, curve),
        write_rows(folder / STALENESS_FILE, staleness),
    ]


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    """Writes a table as CSV; its path."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def _key(figures: Figures) -> dict[str, object]:
    return {
        "load": figures.conditions.load.value,
        "mode": figures.conditions.mode.name,
    }


def _run_row(figures: Figures) -> dict[str, object]:
    """One run in one row; what is not known is empty in CSV and null in JSON."""
    return {
        **_key(figures),
        "steps_per_s": round(figures.steps_per_s, 3),
        "samples_per_s": round(figures.samples_per_s, 3),
        "sample_count": figures.sample_count,
        "dropped_sample_count": figures.dropped_sample_count,
        "step_cost": round(figures.step_cost, 4),
        "duration_s": round(figures.duration_s, 3),
        "target_s": None if figures.target_s is None else round(figures.target_s, 3),
        "final_accuracy": round(figures.final_accuracy, 4),
        "staleness_mean": round(figures.staleness_mean, 3),
        "staleness_max": figures.staleness_max,
        "call_ms": round(figures.call_ms, 3),
        "own_work_ms": round(figures.own_work_ms, 3),
    }
