"""Prints the shape of the code: rooms and arrows, what one step crosses, what is big.

Questions for a review, and no gates. The step is a real one: one worker, one shard and
a coordinator in this process, under a profiler.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.shape.sources import Sources
from tests.shape.step import Crossing, crossing_of_a_step

PACKAGES = ("psworker", "psctl", "psserver", "pswire")
METHOD_COUNT_MAX = 15
ARGUMENT_COUNT_MAX = 7
SPLINTER_LINES_MAX = 60


def main() -> None:
    """Prints all of it."""
    console = Console(width=100)
    sources = Sources.of(PACKAGES)
    _print(
        console,
        "Packages",
        ("package", "modules", "lines", "code", "rooms", "loose", "floors", "arrows"),
        [_package_row(sources, package) for package in PACKAGES],
        "code: without blank lines, comments and docstrings. rooms: packages inside. "
        "floors: modules on the longest way down. arrows: imports between rooms, and "
        "from or to loose modules.",
    )
    between = sources.imports_between("psserver.coordinator", "psserver.shard")
    console.print(f"Imports between coordinator and shard: {len(between)}")
    _print_step(console, crossing_of_a_step())
    _print(
        console,
        f"Classes with more than {METHOD_COUNT_MAX} public methods or "
        f"{ARGUMENT_COUNT_MAX} arguments of the constructor",
        ("class", "module", "methods", "arguments"),
        [
            (each.name, each.module, each.method_count, each.argument_count)
            for each in sources.classes()
            if each.method_count > METHOD_COUNT_MAX
            or each.argument_count > ARGUMENT_COUNT_MAX
        ],
    )
    _print(
        console,
        f"Modules with one importer and under {SPLINTER_LINES_MAX} lines",
        ("module", "lines", "importer"),
        sources.splinters(SPLINTER_LINES_MAX),
    )


def _package_row(sources: Sources, package: str) -> tuple[object, ...]:
    modules = sources.modules_of(package)
    return (
        package,
        len(modules),
        sum(sources.line_count(each) for each in modules),
        sum(sources.code_line_count(each) for each in modules),
        len(sources.rooms(package)),
        len(sources.loose(package)),
        sources.floor_count(package),
        sources.arrow_count(package),
    )


def _print_step(console: Console, crossing: Crossing) -> None:
    _print(
        console,
        "What one step of one worker on one shard crosses",
        ("package", "modules", "functions", "moves between modules"),
        [
            *(
                (
                    package,
                    crossing.module_count(package),
                    crossing.function_count(package),
                    "",
                )
                for package in PACKAGES
            ),
            (
                "all",
                crossing.module_count(),
                crossing.function_count(),
                crossing.move_count,
            ),
        ],
    )


def _print(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    note: str = "",
) -> None:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
    if note:
        console.print(note)
    console.print()


if __name__ == "__main__":
    main()
