"""Ratios against their targets as a picture, where matplotlib is installed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from psctl.bench.figures import Ratio, WorkloadFigures

PICTURE_FILE: Final = "bench.png"

# Of Okabe and Ito, which people who see colours differently can tell apart.
_MET: Final = "#0072B2"
_MISSED: Final = "#E69F00"
_WIDTH_INCHES: Final = 10.0
_ROW_INCHES: Final = 0.45
_MARGIN_INCHES: Final = 1.2


def draw(figures: Sequence[WorkloadFigures], folder: Path) -> Path:
    """Draws each ratio in limits: up to 1 the target is met. Where the picture is."""
    # Not `pyplot`: it would look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    rows = [(each.workload.name, ratio) for each in figures for ratio in each.ratios]
    height = _MARGIN_INCHES + _ROW_INCHES * len(rows)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for position, (_, ratio) in enumerate(rows):
        share = ratio.share_of_limit or 1.0
        colour = _MET if ratio.is_met else _MISSED
        axes.barh(position, share - 1, left=1, color=colour, height=0.6)
        axes.annotate(
            _label(ratio),
            (max(share, 1.0), position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.axvline(1.0, color="0.1", linewidth=1)
    axes.set_yticks(
        range(len(rows)),
        [f"{name}: {ratio.target.text}" for name, ratio in rows],
        fontsize=8,
    )
    axes.invert_yaxis()
    # Twice as good and twice as bad are equally far from the limit.
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    # Room for labels, and for both sides of the limit.
    shares = [ratio.share_of_limit or 1.0 for _, ratio in rows]
    axes.set_xlim(min([0.5, *shares]) / 1.1, max([2.0, *shares]) * 2)
    axes.set_xlabel("share of the limit: up to 1, the target is met")
    path = folder / PICTURE_FILE
    figure.savefig(path, dpi=130)
    return path


def _label(ratio: Ratio) -> str:
    if ratio.measured is None:
        return "not measured"
    verdict = "" if ratio.is_met else ", missed"
    return f"{ratio.share_of_limit:.2f}{verdict} (the ratio is {ratio.measured:.2f})"
