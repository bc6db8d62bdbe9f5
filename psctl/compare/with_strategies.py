"""`psctl compare --strategies`: ways to train beside each other, on one link."""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from psctl.bench.limited_link import ProxyLink
from psctl.compare.characters import Characters
from psctl.compare.job import JobPlan, Say, comparing, run_job
from psctl.compare.loads import Load
from psctl.compare.picture import can_draw, draw_strategies
from psctl.compare.report import head, write_rows
from psctl.compare.strategies import Contender
from psctl.compare.strategy_runs import (
    LinkSpeed,
    Point,
    Progression,
    StrategyFigures,
    StrategyRun,
    figures_of,
)
from psctl.tables import aligned
from psworker.launch.cores import usable_core_count

SHARD_COUNT: Final = 1
"""So that the link of a worker is that of its connection to the shard."""

TARGET_OVER_FIRST: Final = 1.02
"""Times the final loss of the first contender, whose time is reported."""

RUNS_FILE: Final = "strategies.csv"
CURVE_FILE: Final = "losses.csv"

_EVALUATED_MAX: Final = 60
"""Points of a curve: each is evaluated, after the run."""
_MEASURED_STEPS: Final = 40
_BASE_OVER_WORK: Final = 1.2
"""What a step takes at least, over its work when all workers share the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySettings:
    """What to compare.

    Attributes:
        contenders: Each runs under each load; the others are held beside the first.
        sample_count: Samples of each run, over all workers.
        batch_size: Samples of a worker's step.
        link: Between each worker and the shard; None for none.
        base_ms: Least time of an undisturbed step; None to measure it.
    """

    contenders: tuple[Contender, ...]
    loads: tuple[Load, ...]
    link: LinkSpeed | None
    worker_count: int
    sample_count: int
    batch_size: int
    base_ms: float | None
    seed: int
    snapshot_interval_s: float
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyComparison:
    """All that was measured.

    Attributes:
        base_s: Least time of an undisturbed step.
        figures: By load, and then in the order of the contenders.
    """

    settings: StrategySettings
    base_s: float
    figures: tuple[StrategyFigures, ...]
    files: tuple[Path, ...]

    def first(self, figures: StrategyFigures) -> StrategyFigures:
        """The run of the first contender under the same load."""
        load = figures.run.load
        return next(each for each in self.figures if each.run.load is load)

    def target_loss(self, figures: StrategyFigures) -> float:
        """The loss whose time is reported."""
        return TARGET_OVER_FIRST * self.first(figures).final_loss


def run_strategies(settings: StrategySettings, say: Say) -> StrategyComparison:
    """Trains once with each contender under each load."""
    pairs = list(itertools.product(settings.loads, settings.contenders))
    figures: list[StrategyFigures] = []
    with comparing(settings.out, say) as (folder, scratch):
        text = Characters()
        base_s = _base_s(settings, text)
        for number, (load, contender) in enumerate(pairs, start=1):
            name = f"[{number}/{len(pairs)}] {load}, {contender.name}"
            run = StrategyRun(
                contender=contender,
                load=load,
                worker_count=settings.worker_count,
                batch_size=settings.batch_size,
                sample_count=settings.sample_count,
                base_s=base_s,
                seed=settings.seed,
            )
            say(f"{name}: starting {settings.worker_count} workers")
            figures.append(_run(settings, run, text, scratch, name, say))
            say(
                f"{name}: {figures[-1].duration_s:.1f} s, loss "
                f"{figures[-1].final_loss:.3f}"
            )
    comparison = StrategyComparison(
        settings=settings, base_s=base_s, figures=tuple(figures), files=()
    )
    files = [
        write_rows(folder / RUNS_FILE, [_row(comparison, each) for each in figures]),
        write_rows(folder / CURVE_FILE, _curve_rows(figures)),
    ]
    if can_draw():
        files.append(draw_strategies(figures, folder))
    return StrategyComparison(
        settings=settings, base_s=base_s, figures=tuple(figures), files=tuple(files)
    )


def _run(
    settings: StrategySettings,
    run: StrategyRun,
    text: Characters,
    scratch: Path,
    name: str,
    say: Say,
) -> StrategyFigures:
    speed = settings.link
    link = None
    if speed is not None:
        why = "only that has a latency"
        link = ProxyLink(speed.mbit, why, latency_ms=speed.latency_ms)
    plan = JobPlan(
        mode=run.contender.mode,
        options=run.contender.mode.coordinator_options(),
        worker=("psctl.compare.strategy_worker", run.to_argument()),
        worker_count=run.worker_count,
        shard_count=SHARD_COUNT,
        snapshot_interval_s=settings.snapshot_interval_s,
        link=link,
    )

    def said(points: Sequence[Point]) -> str:
        progression = Progression(points)
        done = sum(each.sample_count for each in progression.at(progression.ended_s))
        return f"{name}: {done:,} of {run.sample_count:,} samples are trained"

    points, snapshots = run_job(plan, scratch, Point, said, say)
    # Evaluated now that no process needs the cores.
    every = math.ceil(len(snapshots) / _EVALUATED_MAX)
    shown = [*snapshots[:-1:every], snapshots[-1]]
    losses = [
        (at_s, text.held_out_loss(text.model_of(snapshot))) for at_s, snapshot in shown
    ]
    return figures_of(run, points, losses)


def _base_s(settings: StrategySettings, text: Characters) -> float:
    """Least time of an undisturbed step: what its work takes when all share the cores.

    So that no run is faster only because its workers wait more, which leaves cores to
    the others.
    """
    if settings.base_ms is not None:
        return settings.base_ms / 1000
    model = text.new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = text.samples(settings.batch_size, settings.seed).tensors
    took_s = []
    for _ in range(_MEASURED_STEPS):
        began_s = time.perf_counter()
        model.loss(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        took_s.append(time.perf_counter() - began_s)
    shared = math.ceil(settings.worker_count / usable_core_count())
    base_ms = 1000 * _BASE_OVER_WORK * shared * min(took_s)
    return math.ceil(base_ms) / 1000


def strategies_text(comparison: StrategyComparison) -> str:
    """The comparison for people."""
    settings = comparison.settings
    link = settings.link.text if settings.link else "of this machine"
    parts = [
        f"{settings.worker_count} workers, {SHARD_COUNT} shard, "
        f"{settings.sample_count:,} samples for each run in batches of "
        f"{settings.batch_size}, seed {settings.seed}\n"
        f"link of each worker: {link}\n"
        f"an undisturbed step takes {1000 * comparison.base_s:.0f} ms or more"
    ]
    parts += [
        f"{load.upper()}: {load.description}\n\n{_table(comparison, load)}"
        for load in settings.loads
    ]
    first = settings.contenders[0].name
    parts.append(
        "SENT and RECEIVED are of all workers together, LOSS is held out, at the end.\n"
        f"Beside {first}: TIMES the samples a second, FEWER bytes, and OFF\n"
        "from its loss. docs/strategies.md tells which way to choose when."
    )
    parts.append("written:\n" + "\n".join(f"    {path}" for path in comparison.files))
    return "\n\n".join(parts)


def _table(comparison: StrategyComparison, load: Load) -> str:
    mine = [each for each in comparison.figures if each.run.load is load]
    # Last is what may be long, with options.
    header = (
        *("TIME", "SAMPLES/S", "TIMES", "SENT", "RECEIVED", "FEWER", "LOSS", "OFF"),
        *(f"TO {comparison.target_loss(mine[0]):.3f}", "STRATEGY"),
    )
    rows = []
    for each in mine:
        first = comparison.first(each)
        to_target_s = each.first_at_s(comparison.target_loss(each))
        rows.append(
            (
                f"{each.duration_s:.1f} s",
                f"{each.samples_per_s:.0f}",
                f"{each.samples_per_s / first.samples_per_s:.1f}",
                _bytes_text(each.sent_bytes),
                _bytes_text(each.received_bytes),
                f"{first.byte_count / each.byte_count:.1f}",
                f"{each.final_loss:.3f}",
                f"{100 * (each.final_loss / first.final_loss - 1):+.1f} %",
                "never" if to_target_s is None else f"{to_target_s:.1f} s",
                each.run.contender.name,
            )
        )
    return aligned(header, rows, right=header[:-1])


def _bytes_text(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def strategies_json(comparison: StrategyComparison) -> dict[str, object]:
    """The comparison for programs, see docs/psctl.md."""
    settings = comparison.settings
    link = settings.link
    return {
        **head("strategies"),
        "worker_count": settings.worker_count,
        "shard_count": SHARD_COUNT,
        "sample_count": settings.sample_count,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "base_ms": round(1000 * comparison.base_s, 3),
        "link_mbit": link and link.mbit,
        "link_latency_ms": link and link.latency_ms,
        "runs": [
            {
                **_row(comparison, each),
                "curve": [
                    [
                        round(point.at_s, 3),
                        point.sample_count,
                        point.byte_count,
                        round(point.loss, 5),
                    ]
                    for point in each.curve
                ],
            }
            for each in comparison.figures
        ],
        "files": [str(path) for path in comparison.files],
    }


def _row(comparison: StrategyComparison, each: StrategyFigures) -> dict[str, object]:
    """One run in one row; what is not known is empty in CSV and null in JSON."""
    first = comparison.first(each)
    target_loss = comparison.target_loss(each)
    target_s = each.first_at_s(target_loss)
    return {
        **_key(each),
        "duration_s": round(each.duration_s, 3),
        "sample_count": each.sample_count,
        "samples_per_s": round(each.samples_per_s, 3),
        "samples_per_s_over_first": round(each.samples_per_s / first.samples_per_s, 4),
        "exchange_count": each.exchange_count,
        "sent_bytes": each.sent_bytes,
        "received_bytes": each.received_bytes,
        "first_bytes_over_own": round(first.byte_count / each.byte_count, 4),
        "final_loss": round(each.final_loss, 5),
        "final_loss_over_first": round(each.final_loss / first.final_loss, 5),
        "target_loss": round(target_loss, 5),
        "target_s": None if target_s is None else round(target_s, 3),
    }


def _key(each: StrategyFigures) -> dict[str, object]:
    return {"load": each.run.load.value, "strategy": each.run.contender.name}


def _curve_rows(figures: Sequence[StrategyFigures]) -> list[dict[str, object]]:
    return [
        {
            **_key(each),
            "seconds": round(point.at_s, 3),
            "samples": point.sample_count,
            "bytes": point.byte_count,
            "loss": round(point.loss, 5),
        }
        for each in figures
        for point in each.curve
    ]
