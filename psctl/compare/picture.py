"""The comparison as a picture, where matplotlib is installed."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from psctl.compare.figures import Figures
from psctl.compare.ratios import ideal_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from psctl.compare.strategy_runs import LossPoint, StrategyFigures
    from psctl.compare.under_attack import AttackedRun

PICTURE_FILE: Final = "compare.png"
ATTACKS_FILE: Final = "attacks.png"
STRATEGIES_FILE: Final = "strategies.png"

NOT_INSTALLED: Final = (
    "no picture: matplotlib is not installed; run `pip install 'paramserver[plot]'`"
)

# Of Okabe and Ito, which people who see colours differently can tell apart.
_COLOURS: Final = ("#4D4D4D", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
_PANEL_INCHES: Final = (4.6, 3.4)
_ACCURACY_MARGIN: Final = 0.05
"""Of the accuracy axis, above and below what it shows."""


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw(figures: Sequence[Figures], target_accuracy: float, folder: Path) -> Path:
    """Draws all runs; where the picture is."""
    loads = list(dict.fromkeys(each.conditions.load for each in figures))
    figure, panels = _panels(len(loads), 3)
    for row, load in zip(panels, loads, strict=True):
        runs = [each for each in figures if each.conditions.load is load]
        _draw_accuracy(row[0], runs, target_accuracy)
        _draw_rates(row[1], runs)
        _draw_staleness(row[2], runs)
        titles = (
            f"{load}: {load.description}",
            f"{load}: pace",
            f"{load}: staleness (BSP has none)",
        )
        for panel, title in zip(row, titles, strict=True):
            panel.set_title(title, loc="left", fontsize=10)
    return _saved(figure, folder / PICTURE_FILE)


def _panels(rows: int, columns: int, *, sharey: bool = False) -> "tuple[Figure, Any]":
    """An empty picture, and its panels by row and column."""
    # Not `pyplot`: it would look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = _PANEL_INCHES
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def _saved(figure: "Figure", path: Path) -> Path:
    figure.savefig(path, dpi=130)
    return path


def draw_attacks(runs: "Sequence[AttackedRun]", folder: Path) -> Path:
    """Draws accuracies over time, a panel for each attack; where the picture is."""
    clean, *attacked = runs
    attacks = list(dict.fromkeys(each.attack for each in attacked))
    figure, (panels,) = _panels(1, len(attacks), sharey=True)
    for axes, attack in zip(panels, attacks, strict=True):
        assert attack is not None, "the clean run comes first"
        mine = [each for each in attacked if each.attack == attack]
        for colour, run in zip(_COLOURS, [clean, *mine], strict=False):
            axes.plot(
                [point.at_s for point in run.curve],
                [point.accuracy for point in run.curve],
                color=colour,
                linestyle="--" if run is clean else "-",
                label="clean" if run is clean else str(run.rule),
            )
        axes.set_title(
            f"{attack.name}: {attack.attacker_count} workers send\n{attack.described}",
            loc="left",
            fontsize=10,
        )
        axes.set_xlabel("seconds")
        axes.set_ylim(0.0, 1.0)
        axes.legend(loc="lower right", frameon=False, fontsize=8)
    panels[0].set_ylabel("held-out accuracy")
    return _saved(figure, folder / ATTACKS_FILE)


def draw_strategies(figures: "Sequence[StrategyFigures]", folder: Path) -> Path:
    """Draws losses over time, samples and bytes; where the picture is."""
    loads = list(dict.fromkeys(each.run.load for each in figures))
    figure, panels = _panels(len(loads), len(_OVER), sharey=True)
    for row, load in zip(panels, loads, strict=True):
        runs = [each for each in figures if each.run.load is load]
        for axes, (over, of_point) in zip(row, _OVER.items(), strict=True):
            _draw_losses(axes, runs, of_point)
            axes.set_xlabel(over)
        row[0].set_title(f"{load}: {load.description}", loc="left", fontsize=10)
        row[0].set_ylabel("held-out loss")
    lowest, highest = loss_limits([each.curve for each in figures])
    for column, of_point in enumerate(_OVER.values()):
        shown = [
            of_point(point)
            for each in figures
            for point in each.curve
            if point.loss <= highest and of_point(point) > 0
        ]
        for axes in panels[:, column]:
            axes.set_xlim(min(shown) / _MARGIN, max(shown) * _MARGIN)
    panels[0, 0].set_ylim(lowest, highest)
    # All loads have the same runs. A name with options is wider than a panel.
    lines = panels[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower left", frameon=False, fontsize=8)
    return _saved(figure, folder / STRATEGIES_FILE)


def loss_limits(curves: "Sequence[Sequence[LossPoint]]") -> tuple[float, float]:
    """Ends of the loss axis: the fall from the first values is mostly left out."""
    lowest = min(point.loss for curve in curves for point in curve)
    ends = [curve[-1].loss for curve in curves]
    return 0.98 * lowest, max(1.5 * lowest, 1.05 * max(ends))


def _draw_losses(
    axes: "Axes",
    runs: "Sequence[StrategyFigures]",
    of_point: "Callable[[LossPoint], float]",
) -> None:
    """Both axes of a factor: runs differ by factors of ten in time and in bytes."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    for figures, (colour, line) in zip(runs, _styles(), strict=False):
        points = [each for each in figures.curve if of_point(each) > 0]
        over = [of_point(each) for each in points]
        axes.plot(
            over,
            [each.loss for each in points],
            color=colour,
            linestyle=line,
            label=figures.run.contender.name,
        )
        axes.plot(over[-1], figures.final_loss, "o", color=colour, markersize=4)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _styles() -> "Iterator[tuple[str, str]]":
    """Colours, and then the same ones with other lines."""
    return ((colour, line) for line in _LINES for colour in _COLOURS)


_MARGIN: Final = 1.3
"""Of an axis of factors, on each side."""

_LINES: Final = ("-", "--", ":")

_OVER: "Final[Mapping[str, Callable[[LossPoint], float]]]" = {
    "seconds": lambda point: point.at_s,
    "samples of all workers": lambda point: point.sample_count,
    "megabytes of all workers, both ways": lambda point: point.byte_count / 1e6,
}


def accuracy_limits(runs: Sequence[Figures]) -> tuple[float, float]:
    """Ends of the accuracy axis, which fits what the runs have.

    Where all runs got beyond 0.5, their climb up to there is left out, so that the
    differences at the end can be seen.
    """
    if min(run.final_accuracy for run in runs) > 0.5:
        return 0.5, 1.0
    seen = [point.accuracy for run in runs for point in run.curve]
    return (
        max(0.0, min(seen) - _ACCURACY_MARGIN),
        min(1.0, max(seen) + _ACCURACY_MARGIN),
    )


def _draw_accuracy(
    axes: "Axes", runs: Sequence[Figures], target_accuracy: float
) -> None:
    for colour, run in zip(_COLOURS, runs, strict=False):
        axes.plot(
            [point.at_s for point in run.curve],
            [point.accuracy for point in run.curve],
            color=colour,
            label=run.conditions.mode.label,
        )
        axes.plot(run.curve[-1].at_s, run.curve[-1].accuracy, "o", color=colour)
    axes.axhline(target_accuracy, color="0.6", linestyle=":", linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel("held-out accuracy")
    axes.set_ylim(*accuracy_limits(runs))
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", frameon=False)


def _draw_rates(axes: "Axes", runs: Sequence[Figures]) -> None:
    labels = [run.conditions.mode.label for run in runs]
    rates = [run.samples_per_s for run in runs]
    bars = axes.bar(labels, rates, color=_COLOURS[: len(runs)], width=0.6)
    axes.bar_label(
        bars, [f"{rate:.0f}" for rate in rates], label_type="center", color="white"
    )
    for index, run in enumerate(runs):
        ideal = run.sample_count / ideal_s(run.conditions)
        axes.plot([index - 0.4, index + 0.4], [ideal, ideal], color="0.1", linewidth=1)
    axes.plot([], [], color="0.1", linewidth=1, label="if only the delays took time")
    axes.set_ylabel("samples in updates a second")
    axes.set_xlim(-0.6, len(runs) - 0.4)
    axes.margins(y=0.25)
    axes.legend(loc="upper left", frameon=False)


def _draw_staleness(axes: "Axes", runs: Sequence[Figures]) -> None:
    from matplotlib.ticker import MaxNLocator

    for colour, run in zip(_COLOURS, runs, strict=False):
        if run.conditions.mode.is_synchronous:
            continue  # Always 0, which would hide what the others have there.
        total = sum(run.staleness_counts.values())
        axes.plot(
            range(run.staleness_max + 1),
            [
                run.staleness_counts.get(each, 0) / total
                for each in range(run.staleness_max + 1)
            ],
            color=colour,
            marker=".",
            label=run.conditions.mode.label,
        )
    axes.set_xlim(-0.5, max(run.staleness_max for run in runs) + 1)
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend(loc="upper right", frameon=False)
    axes.set_xlabel("staleness, in updates")
    axes.set_ylabel("share of gradients")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
