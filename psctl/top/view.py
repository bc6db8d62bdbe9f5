"""What `psctl top` shows, as lines of a size: pure, without a terminal."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from psctl.tables import fitted, time_text
from pswire.byte_text import byte_text
from pswire.names import printable
from psworker.pace import EpochProgress, Pace, duration_text

EVENT_COUNT_MAX: Final = 200
LOSS_COUNT_MAX: Final = 240
NAME_LENGTH_MAX: Final = 24

Row = Mapping[str, Any]


class Pane(StrEnum):
    WORKERS = "workers"
    SHARDS = "shards"
    EVENTS = "events"


class Style(StrEnum):
    """What a line, or a part of it, is."""

    PLAIN = "plain"
    DIM = "dim"
    TITLE = "title"
    CHOSEN = "chosen"
    GOOD = "good"
    NOTICE = "notice"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    style: Style = Style.PLAIN


QUIET_CAUSES: Final = ("training", "finished")
_BAD_CAUSES: Final = ("failed", "worker_lost", "shard_lost", "disk")
_BAD_EVENTS: Final = frozenset(
    {
        *("job_failed", "job_rewound", "worker_lost", "worker_evicted"),
        *("shard_lost", "checkpoint_failed"),
    }
)


@dataclass(slots=True)
class Seen:
    """What is known of a job: what the last status said, and what came before.

    Attributes:
        document: The last status.
        events: The newest events, oldest first.
        losses: Of late, oldest first.
        epoch: How far the newest one is.
        trouble: Why the last question was not answered; empty if it was.
        silent_s: For how long none was.
    """

    document: Row | None = None
    events: deque[Row] = field(default_factory=lambda: deque(maxlen=EVENT_COUNT_MAX))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_COUNT_MAX))
    epoch: EpochProgress | None = None
    trouble: str = ""
    silent_s: float = 0.0
    _pace: Pace = field(default_factory=Pace)

    def take(self, document: dict[str, Any]) -> None:
        """A new status."""
        before = self.document
        if before is not None and before["job"]["job_id"] != document["job"]["job_id"]:
            self.losses.clear()
        self.document = document
        self.epoch = self._pace.take(document)
        self.trouble, self.silent_s = "", 0.0
        loss = document["metrics"].get("loss")
        if loss is not None:
            self.losses.append(loss)


@dataclass(slots=True)
class Choice:
    """Which pane the person looks at, and from which row on."""

    pane: Pane = Pane.WORKERS
    first: dict[Pane, int] = field(default_factory=lambda: dict.fromkeys(Pane, 0))

    def press(self, key: str) -> None:
        """A key: the next or the last pane, a row down or up."""
        panes = list(Pane)
        at = panes.index(self.pane)
        if key in ("\t", "l", "right"):
            self.pane = panes[(at + 1) % len(panes)]
        elif key in ("h", "left"):
            self.pane = panes[at - 1]
        elif key in ("j", "down"):
            self.first[self.pane] += 1
        elif key in ("k", "up"):
            self.first[self.pane] = max(0, self.first[self.pane] - 1)


def frame(
    seen: Seen, choice: Choice, *, width: int, height: int, unicode: bool = True
) -> list[Line]:
    """All lines of a screen, no more than fit; without the end that is too much."""
    if seen.document is None:
        return [Line("waiting for the job's status")]
    head = _head(seen, width, unicode, wrap_max=max(2, height // 4))
    panes = {pane: _pane(pane, seen, width) for pane in Pane}
    room = max(0, height - len(head) - 1 - len(Pane))
    counts = heights({p: len(rows) for p, (_, rows) in panes.items()}, choice, room)
    lines, which = list(head), ""
    for pane, (title, rows) in panes.items():
        is_chosen = pane is choice.pane
        first = max(0, min(choice.first[pane], len(rows) - counts[pane]))
        choice.first[pane] = first
        shown = [
            Line(row.text[:width], row.style)
            for row in rows[first : first + counts[pane]]
        ]
        lines += [Line(title, Style.CHOSEN if is_chosen else Style.TITLE), *shown]
        if is_chosen:
            which = f"{pane.value} {first + 1} to {first + len(shown)} of {len(rows)}"
    lines = lines[: height - 1]
    lines += [Line("")] * (height - 1 - len(lines))
    footer = _with_end("q quit   tab pane   j k scroll", which, width)
    return [*lines, Line(footer[:width], Style.DIM)]


def whole(seen: Seen, *, width: int, unicode: bool = True) -> list[Line]:
    """One look without a terminal: every row there is."""
    lines = _head(seen, width, unicode, wrap_max=None)
    for pane in Pane:
        title, rows = _pane(pane, seen, width)
        lines += [Line(""), Line(title, Style.TITLE), *rows]
    return lines


def heights(needs: Mapping[Pane, int], choice: Choice, room: int) -> dict[Pane, int]:
    """Rows of each pane: a few of each, then what the chosen one needs, then the rest.

    Args:
        needs: Rows that each has.
        choice: Which is chosen.
        room: Rows that there are for all.
    """
    given = dict.fromkeys(Pane, 0)
    order = [choice.pane, *(pane for pane in Pane if pane is not choice.pane)]
    for most in (min(3, room // len(Pane)), room):
        for pane in order:
            more = min(needs[pane], most) - given[pane]
            given[pane] += max(0, min(more, room - sum(given.values())))
    return given


def _head(seen: Seen, width: int, unicode: bool, wrap_max: int | None) -> list[Line]:
    """What is above the panes.

    Args:
        seen: The job.
        width: Columns.
        unicode: Whether the terminal has more than ASCII.
        wrap_max: Lines that a sentence may take; None for as many as it needs.
    """
    document = seen.document
    assert document is not None, "there is nothing to show before"
    mode = document["mode"]
    if number := document["staleness_bound"] or document["quorum"]:
        mode = f"{mode}({number})"
    clocks = [w["clock"] for w in document["workers"] if w["clock"] is not None]
    title = "  ".join(
        [
            printable(document["job"]["job_id"])[:NAME_LENGTH_MAX],
            document["phase"],
            mode,
            f"clock {min(clocks, default=0):,}",
            *([duration_text(document["elapsed_s"])] if document["elapsed_s"] else []),
        ]
    )
    lines = [Line(_with_end(title, document["coordinator"], width), Style.TITLE)]
    if seen.trouble:
        text = (
            f"NO ANSWER for {seen.silent_s:.0f} s, what follows is from before: "
            f"{printable(seen.trouble)}"
        )
        lines += [Line(each, Style.BAD) for each in wrapped(text, width, wrap_max)]
    else:
        cause = document["diagnosis"]["cause"]
        sentence = document["diagnosis"]["sentence"] or document["phase"]
        style = Style.GOOD if cause in QUIET_CAUSES else Style.NOTICE
        style = Style.BAD if cause in _BAD_CAUSES else style
        text = printable(sentence)
        lines += [Line(each, style) for each in wrapped(text, width, wrap_max)]
    if document["strategy"]:
        lines.append(Line(printable(document["strategy"])))
    lines.append(Line(_rates(seen, width, unicode)))
    lines.append(Line(_data(seen.epoch, width, unicode)))
    is_told = not seen.trouble and cause in ("disk", "checkpoint_failing")
    text = _checkpoint(document["checkpoints"], is_told=is_told)
    lines += [Line(each) for each in wrapped(text, width, wrap_max)]
    return [Line(each.text[:width], each.style) for each in lines]


def _rates(seen: Seen, width: int, unicode: bool) -> str:
    document = seen.document
    assert document is not None, "as of the head"
    parts = [
        f"{_number(document[name])} {words}"
        for name, words in (("steps_per_s", "steps/s"), ("samples_per_s", "samples/s"))
        if document[name] is not None
    ]
    metrics = dict(document["metrics"])
    if "loss" in metrics:
        curve = sparkline(seen.losses, 20 if width < 100 else 40, unicode)
        parts.append(f"loss {_number(metrics.pop('loss'))} {curve}".rstrip())
    parts += [
        f"{printable(name)[:NAME_LENGTH_MAX]} {_number(value)}"
        for name, value in sorted(metrics.items())
    ]
    return "   ".join(parts) or "no step yet"


def _data(epoch: EpochProgress | None, width: int, unicode: bool) -> str:
    if epoch is None:
        return "data: no prepared loader has begun an epoch"
    label = f"epoch {epoch.epoch} of {printable(epoch.loader)[:NAME_LENGTH_MAX]}"
    count = f"{epoch.done_count:,} of {epoch.count:,}"
    end = "over" if epoch.is_over else epoch.left_text
    bar_width = max(10, min(40, width - len(label) - len(count) - len(end) - 12))
    bar = progress_bar(epoch.part, bar_width, unicode)
    return f"{label}  {bar} {100 * epoch.part:3.0f} %  {count}  {end}".rstrip()


def _checkpoint(checkpoints: Row | None, *, is_told: bool) -> str:
    """The newest one, and why the last try has failed unless that is told already."""
    if checkpoints is None:
        return "no checkpoints are made (--checkpoint-dir)"
    newest = checkpoints["newest"]
    every = printable(checkpoints["interval"])
    text = f"no checkpoint yet, one every {every}"
    if newest is not None:
        text = (
            f"checkpoint {duration_text(newest['age_ms'] / 1000)} ago, version "
            f"{newest['version']}, {byte_text(newest['byte_count'])}, every {every}"
        )
    if checkpoints["failure"]:
        why = "" if is_told else f": {printable(checkpoints['failure'])}"
        text = f"CHECKPOINTS FAIL{why}; {text}"
    return text


def _pane(pane: Pane, seen: Seen, width: int) -> tuple[str, list[Line]]:
    """The title, and all rows."""
    document = seen.document
    assert document is not None, "as of the head"
    if pane is Pane.EVENTS:
        rows = [_event_line(event) for event in reversed(seen.events)]
        return "EVENTS", rows or [Line("none yet", Style.DIM)]
    entries = document[pane.value]
    if not entries:
        return pane.value.upper(), [Line(f"no {pane.value}", Style.DIM)]
    awaited = attention(document)
    if pane is Pane.WORKERS:
        entries = sorted(entries, key=lambda e: _order(e, awaited))
        text = _worker_table(entries, width)
        styles = [_worker_style(each, awaited) for each in entries]
    else:
        text = _shard_table(entries, width)
        styles = [
            Style.BAD if each["state"] != "ready" else Style.PLAIN for each in entries
        ]
    title, *texts = text.splitlines()
    rows = [Line(row, style) for row, style in zip(texts, styles, strict=True)]
    return title[:width], rows


def attention(document: Row) -> set[str]:
    """Names of workers that the diagnosis, or a shard's wait, is about."""
    waits = (s["waiting"] for s in document["shards"] if s["waiting"] is not None)
    names = {each["name"] for wait in waits for each in wait["awaited"]}
    if document["diagnosis"]["cause"] not in QUIET_CAUSES:
        names |= set(document["diagnosis"]["who"])
    return names


def _order(worker: Row, awaited: set[str]) -> tuple[object, ...]:
    """Those that somebody has to look at first, then by the numbers in their names."""
    name = worker["worker_id"]
    parts = re.split(r"(\d+)", name)
    natural = [(int(p), "") if p.isdecimal() else (0, p) for p in parts]
    is_fine = worker["state"] == "member" and name not in awaited
    return is_fine, natural


def _worker_style(worker: Row, awaited: set[str]) -> Style:
    if worker["state"] in ("suspect", "lost"):
        return Style.BAD
    return Style.NOTICE if worker["worker_id"] in awaited else Style.PLAIN


def _worker_table(workers: Sequence[Row], width: int) -> str:
    return fitted(
        (
            *("WORKER", "STATE", "CLOCK", "LEAD", "STEPS/S", "LOSS", "COMPUTE"),
            *("DATA", "SEND", "ANSWER", "OTHERS", "SENT", "MEMORY", "ADDRESS"),
        ),
        [
            (
                printable(w["worker_id"])[:NAME_LENGTH_MAX],
                w["state"],
                _shown(w["clock"]),
                _shown(w["lead"]),
                _number(w["steps_per_s"]),
                _number(w["loss"]),
                *(_milliseconds(w[name]) for name in ("compute_ms", "data_wait_ms")),
                *map(_milliseconds, (w["send_ms"], *_answer_parts_ms(w))),
                _bytes(w["sent_bytes"]),
                _bytes(w["resident_bytes"]),
                w["address"] or "-",
            )
            for w in workers
        ],
        least_useful=("ADDRESS", "MEMORY", "SENT", "LEAD", "LOSS", "STEPS/S", "SEND"),
        right=(
            *("CLOCK", "LEAD", "STEPS/S", "LOSS", "COMPUTE", "DATA", "SEND"),
            *("ANSWER", "OTHERS", "SENT", "MEMORY"),
        ),
        width_max=width,
    )


def _answer_parts_ms(worker: Row) -> tuple[float | None, float | None]:
    """Of the wait for answers, what the link and shards take, and what others take."""
    wait_ms, others_ms = worker["answer_wait_ms"], worker["peer_wait_ms"]
    if wait_ms is None or others_ms is None:
        return wait_ms, others_ms
    # Each is a mean over steps of its own, so that they may differ by a little.
    others_ms = min(wait_ms, others_ms)
    return wait_ms - others_ms, others_ms


def _shard_table(shards: Sequence[Row], width: int) -> str:
    return fitted(
        (
            *("SHARD", "STATE", "CLOCK", "VERSION", "QUEUE", "APPLY", "SIZE"),
            *("RECEIVED", "SENT", "MEMORY", "TORN", "ADDRESS"),
        ),
        [
            (
                str(s["shard_index"]),
                s["state"],
                str(s["clock"]),
                str(s["version"]),
                str(s["queued_push_count"]),
                _milliseconds(s["apply_ms"]),
                _bytes(s["parameter_bytes"]),
                _bytes(s["received_bytes"]),
                _bytes(s["sent_bytes"]),
                _bytes(s["resident_bytes"]),
                str(s["torn_step_count"]),
                s["address"] or "-",
            )
            for s in shards
        ],
        least_useful=("TORN", "SENT", "RECEIVED", "ADDRESS", "MEMORY", "QUEUE"),
        right=(
            *("CLOCK", "VERSION", "QUEUE", "APPLY", "SIZE", "RECEIVED", "SENT"),
            *("MEMORY", "TORN"),
        ),
        width_max=width,
    )


def _event_line(event: Row) -> Line:
    at = time_text(event["at_unix_s"], "%H:%M:%S")
    style = Style.BAD if event["kind"] in _BAD_EVENTS else Style.PLAIN
    return Line(f"{at}  {printable(event['text'])}", style)


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{value:.1f} ms"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _bytes(value: int | None) -> str:
    return "-" if value is None else byte_text(value)


def _with_end(text: str, end: str, width: int) -> str:
    """A text, and another one at the right edge, if there is room for both."""
    gap = width - len(text) - len(end)
    return f"{text}{' ' * gap}{end}" if gap >= 2 else text


def wrapped(text: str, width: int, line_count: int | None) -> list[str]:
    """A text in lines, at most so many; what is too long ends with dots."""
    import textwrap

    return textwrap.wrap(text, width, max_lines=line_count, placeholder=" ...") or [""]


def sparkline(values: Sequence[float], width: int, unicode: bool) -> str:
    """The course of some numbers, the last `width` of them; empty of fewer than two."""
    marks = "▁▂▃▄▅▆▇█" if unicode else "_.-=*#"
    values = list(values)
    if len(values) < 2:
        return ""
    if len(values) > width:  # every part of the course, not its end alone
        step = len(values) / width
        values = [values[int(i * step)] for i in range(width - 1)] + [values[-1]]
    low, high = min(values), max(values)
    # Halves: the distance of two numbers may be none.
    span = high / 2 - low / 2
    shares = ((each / 2 - low / 2) / span if span else 0.0 for each in values)
    return "".join(marks[round(share * (len(marks) - 1))] for share in shares)


def progress_bar(part: float, width: int, unicode: bool) -> str:
    full, empty = ("█", "░") if unicode else ("#", "-")
    count = round(max(0.0, min(1.0, part)) * width)
    return full * count + empty * (width - count)
