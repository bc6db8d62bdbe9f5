"""`psctl logs`: the logs of a job's processes, in the order of time."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from psctl.__main__ import app
from psctl.failures import CommandError
from psctl.logs import LogFolder, parsed_since

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def line(second: int, event: str, **fields: object) -> str:
    at = f"2026-01-31T11:00:{second:02}.000000Z"
    return json.dumps({"event": event, "level": "info", "timestamp": at, **fields})


def write(path: Path, *lines: str, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(lines) + end)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path / "coordinator.jsonl",
        line(1, "one", role="coordinator"),
        line(5, "five", role="coordinator", clock=3),
    )
    write(tmp_path / "shard-0.jsonl.2", line(2, "two", role="shard", id=0))
    write(tmp_path / "shard-0.jsonl.1", line(3, "three", role="shard", id=0))
    write(tmp_path / "shard-0.jsonl", line(4, "four", role="shard", id=0))
    return tmp_path


def events(found: LogFolder) -> list[str]:
    return [json.loads(each.text)["event"] for each in found.lines()]


def test_lines_of_all_files_come_in_the_order_of_time(folder: Path) -> None:
    found = LogFolder(folder)
    assert events(found) == ["one", "two", "three", "four", "five"]
    assert events(found) == [], "each line once"


def test_new_lines_come_once_each_also_when_a_file_is_begun_anew(folder: Path) -> None:
    found = LogFolder(folder)
    events(found)
    shard = folder / "shard-0.jsonl"
    write(shard, line(6, "six"))
    (folder / "shard-0.jsonl.1").rename(folder / "shard-0.jsonl.2")
    shard.rename(folder / "shard-0.jsonl.1")
    write(shard, line(7, "seven"))
    write(folder / "shard-1.jsonl", line(8, "eight"))
    assert events(found) == ["six", "seven", "eight"]
    write(shard, line(9, "nine"), end="")
    assert events(found) == [], "its end is still being written"
    write(shard, "")
    assert events(found) == ["nine"]


def test_follow_looks_again_after_a_pause(folder: Path) -> None:
    class Stopped(Exception):
        pass

    def pause(seconds: float) -> None:
        if (folder / "new.jsonl").exists():
            raise Stopped
        write(folder / "new.jsonl", line(9, "nine"))

    seen: list[str] = []
    followed = LogFolder(folder).follow(pause)
    with pytest.raises(Stopped):
        seen.extend(json.loads(each.text)["event"] for each in followed)
    assert seen == ["one", "two", "three", "four", "five", "nine"]


def test_a_line_that_is_none_of_ours_keeps_its_place(folder: Path) -> None:
    write(folder / "shard-0.jsonl", "Fatal Python error", "[1, 2]")
    shown = [each.shown() for each in LogFolder(folder).lines()]
    assert [text.split("  ")[-1] for text in shown] == [
        *("one", "two", "three", "four", "Fatal Python error", "[1, 2]"),
        "(clock 3)",
    ]


def test_a_line_says_who_and_where_and_steers_no_terminal(folder: Path) -> None:
    write(
        folder / "worker-h-0.jsonl",
        line(6, "a\x1b[31mb", role="worker", id="w0", clock=7, exception="x\n  y"),
    )
    *_, last = LogFolder(folder, role="worker").lines()
    first, *below = last.shown().split("\n")
    assert first.split() == [
        *("2026-01-31T11:00:06.000", "worker", "w0", "info", r"a\x1b[31mb"),
        *("(clock", "7)"),
    ]
    assert below == ["    x", "      y"]


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("30s", "2026-01-31T11:59:30.000000Z"),
        ("10min", "2026-01-31T11:50:00.000000Z"),
        ("2h", "2026-01-31T10:00:00.000000Z"),
        ("1d", "2026-01-30T12:00:00.000000Z"),
        ("2026-01-31T10:00+01:00", "2026-01-31T09:00:00.000000Z"),
    ],
)
def test_since(text: str, time: str) -> None:
    assert parsed_since(text, NOW) == time


def test_what_is_no_log_is_left_out_or_shown_as_it_is(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    write(folder / "zeta.jsonl", "[" * 10_000)
    assert next(LogFolder(folder).lines()).text == "[" * 10_000


@pytest.mark.parametrize("text", ["", "10", "yesterday", "-5s", "9999999d", "999999d"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no time: give how long ago"):
        parsed_since(text, NOW)


def test_only_what_was_asked_for(folder: Path) -> None:
    since = "2026-01-31T11:00:03.000000Z"
    assert events(LogFolder(folder, since=since)) == ["three", "four", "five"]
    assert events(LogFolder(folder, role="coordinator")) == ["one", "five"]
    assert events(LogFolder(folder, since=since, role="shard")) == ["three", "four"]


@pytest.mark.parametrize(
    "words",
    [
        lambda folder: [str(folder)],
        lambda folder: [f"--log-dir={folder}"],
        lambda folder: [f"--state-dir={folder.parent}"],
    ],
)
def test_the_command_finds_the_folder(
    folder: Path, tmp_path: Path, words: Callable[[Path], list[str]]
) -> None:
    logs = tmp_path / "state" / "logs"
    logs.mkdir(parents=True)
    for path in folder.glob("*.jsonl*"):
        path.rename(logs / path.name)
    done = CliRunner().invoke(app, ["logs", *words(logs), "--json"])
    assert done.exit_code == 0, done.output
    found = [json.loads(text)["event"] for text in done.stdout.splitlines()]
    assert found == ["one", "two", "three", "four", "five"]


def test_a_folder_without_logs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="there are no logs in"):
        LogFolder(tmp_path)
