"""Draws the pictures of `concepts.md`, as SVG beside this file.

Each has a ground of its own, so that it is readable on a dark page too.
"""

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Final

HEAD: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif" \
font-size="14">
<title>{title}</title>
<style>
.ground {{ fill: #ffffff; stroke: #d0d7de }}
.worker {{ fill: #dbeafe; stroke: #2563eb }}
.shard {{ fill: #dcfce7; stroke: #15803d }}
.coordinator {{ fill: #fef3c7; stroke: #b45309 }}
.reader {{ fill: #f3e8ff; stroke: #7e22ce }}
.wait {{ fill: #f1f5f9; stroke: #94a3b8; stroke-dasharray: 4 3 }}
.line {{ stroke: #475569; stroke-width: 1.5; fill: none }}
.control {{ stroke: #b45309; stroke-width: 1.5; stroke-dasharray: 5 4; fill: none }}
.cut {{ stroke: #b91c1c; stroke-width: 2.5; fill: none }}
text {{ fill: #1f2937 }}
.small {{ font-size: 12px; fill: #475569 }}
</style>
<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" \
markerHeight="7" orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="#475569"/>\
</marker></defs>
<rect class="ground" x="1" y="1" width="{inner_width}" height="{inner_height}" rx="8"/>
"""


def text(
    x: float, y: float, words: str, *, anchor: str = "middle", kind: str = ""
) -> str:
    """Words, beside or around a point."""
    styled = f' class="{kind}"' if kind else ""
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}"{styled}>{escape(words)}</text>'
    )


def box(
    kind: str, x: float, y: float, width: float, height: float, *lines: str
) -> list[str]:
    """A box with words: the first line large, the others small."""
    size = f'width="{width}" height="{height}"'
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" {size} rx="5"/>']
    first = y + height / 2 + 5 - 8 * (len(lines) - 1)
    for number, line in enumerate(lines):
        small = "small" if number else ""
        parts.append(text(x + width / 2, first + 17 * number, line, kind=small))
    return parts


def arrow(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    *,
    kind: str = "line",
    both: bool = False,
) -> str:
    """A line with a tip, or with two."""
    start = ' marker-start="url(#tip)"' if both else ""
    return (
        f'<path class="{kind}" d="M{x1} {y1} {x2} {y2}"{start} marker-end="url(#tip)"/>'
    )


def processes() -> Iterable[str]:
    """Who talks to whom."""
    for number in range(3):
        y = 30 + 75 * number
        yield from box("worker", 20, y, 150, 52, f"worker w{number}", "your script")
        for shard in range(2):
            yield arrow(170, y + 26, 360, 62 + 110 * shard, both=True)
    for shard in range(2):
        y = 32 + 110 * shard
        words = "values, optimizer"
        yield from box("shard", 360, y, 150, 62, f"shard {shard}", words)
    yield from box(
        "coordinator", 210, 280, 200, 56, "coordinator", "members, mode, data"
    )
    yield from box("reader", 570, 85, 130, 62, "reader", "evaluates, serves")
    yield arrow(510, 62, 570, 100)
    yield arrow(510, 172, 570, 132)
    yield arrow(250, 280, 115, 232, kind="control", both=True)
    yield arrow(370, 280, 430, 204, kind="control", both=True)
    yield text(262, 20, "gradients, values", kind="small")
    yield text(545, 215, "snapshots", kind="small")
    yield text(440, 312, "decisions; no tensors", anchor="start", kind="small")


def step() -> Iterable[str]:
    """One clock in BSP."""
    for number in range(3):
        y = 30 + 66 * number
        yield from box("worker", 20, y, 150, 46, f"w{number}", "gradient of clock 7")
        yield arrow(170, y + 23, 300, 60)
        yield arrow(170, y + 23, 300, 170)
    for shard in range(2):
        y = 32 + 110 * shard
        yield from box(
            "shard", 300, y, 190, 62, f"shard {shard}", "mean of the three, once"
        )
        yield arrow(490, y + 31, 560, 115)
    yield from box("worker", 560, 88, 140, 54, "all workers", "values of clock 8")
    yield text(235, 240, "a push to each shard", kind="small")
    yield text(525, 240, "the answer of the same call", kind="small")


SLOW_STEP: Final = 100
FAST_STEP: Final = 60
SHOWN: Final = 500


def modes() -> Iterable[str]:
    """A slow and a fast worker in each mode: how long the fast one waits, and when."""
    y = 24
    for name, bound in (("bsp", 0), ("ssp, bound 2", 2), ("asp", SHOWN)):
        yield text(20, y + 32, name, anchor="start")
        for clock in range(SHOWN // SLOW_STEP):
            x = 130 + SLOW_STEP * clock
            yield from box("worker", x, y, SLOW_STEP - 3, 22, str(clock + 1))
        clock = ended = 0
        while True:
            # With `clock` steps done it may begin once the slow one has done all but
            # `bound` of them.
            begins = max(ended, SLOW_STEP * (clock - bound))
            if begins > ended:
                yield from box("wait", 130 + ended, y + 26, begins - ended - 3, 22)
            ended = begins + FAST_STEP
            if ended > SHOWN:
                break
            clock += 1
            yield from box(
                "worker", 130 + begins, y + 26, FAST_STEP - 3, 22, str(clock)
            )
        y += 74
    words = "time goes to the right; a number is a step, dashed is waiting"
    yield text(130, y + 8, words, anchor="start", kind="small")


def cut() -> Iterable[str]:
    """A cut through pushes."""
    starts = (
        (70, 150, 235, 330, 440),
        (90, 190, 280, 390, 480),
        (60, 170, 300, 370, 470),
    )
    for number, row in enumerate(starts):
        y = 34 + 52 * number
        yield text(20, y + 21, f"w{number}", anchor="start")
        for clock, x in enumerate(row, 1):
            kind = "worker" if clock <= 3 else "wait"
            yield from box(kind, x, y, 58, 32, f"{clock}")
    yield '<path class="cut" d="M310 20 C 310 60 355 70 355 110 S 365 160 362 200"/>'
    yield text(160, 215, "in the snapshot, on every shard", kind="small")
    yield text(480, 215, "not in it, on any shard", kind="small")


PICTURES: Final[dict[str, tuple[str, int, int, Callable[[], Iterable[str]]]]] = {
    "processes": ("Workers, shards, the coordinator and a reader", 720, 355, processes),
    "step": ("A step in BSP", 720, 255, step),
    "modes": ("BSP, SSP and ASP side by side", 660, 262, modes),
    "cut": ("A cut through the pushes of three workers", 620, 230, cut),
}


def main() -> None:
    """Writes all of them."""
    for name, (title, width, height, draw) in PICTURES.items():
        head = HEAD.format(
            title=title,
            width=width,
            height=height,
            inner_width=width - 2,
            inner_height=height - 2,
        )
        drawn = "\n".join([head.rstrip(), *draw(), "</svg>", ""])
        Path(__file__).with_name(f"{name}.svg").write_text(drawn)


if __name__ == "__main__":
    main()
