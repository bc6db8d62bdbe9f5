"""What `psctl top` shows, and what it writes to a terminal."""

import re
from typing import Any

import pyte
import pytest

from psctl.tables import time_text
from psctl.top.screen import Painter, keys_in
from psctl.top.view import (
    Choice,
    Line,
    Pane,
    Seen,
    Style,
    attention,
    frame,
    heights,
    progress_bar,
    sparkline,
    whole,
)
from tests.doubles.made_documents import sampled

SENTENCE = "w7 holds up the others: it computes 310 ms of a step, the others 52 ms"


def worker(number: int, **changes: object) -> dict[str, Any]:
    own = {"worker_id": f"w{number}", "answer_wait_ms": 250.0, "peer_wait_ms": 240.0}
    return {**sampled("status")["workers"][0], "clock": 120, **own, **changes}


def shard(index: int, **changes: object) -> dict[str, Any]:
    own = {"shard_index": index, "waiting": None}
    return {**sampled("status")["shards"][0], **own, **changes}


def document(**changes: object) -> dict[str, Any]:
    found = sampled("status")
    epoch = {"epoch": 3, "position_count": 1000, "left_out_count": 0}
    return {
        **found,
        "job": {"job_id": "job-1"},
        "coordinator": "trainer:7070",
        "elapsed_s": 3725.0,
        "diagnosis": {"cause": "straggler", "sentence": SENTENCE, "who": ["w7"]},
        "steps_per_s": 12.5,
        "samples_per_s": 1600.0,
        "metrics": {"loss": 0.25, "accuracy": 0.9},
        "workers": [worker(n) for n in range(12)],
        "shards": [shard(0), shard(1)],
        "checkpoints": None,
        "strategy": None,
        "epochs": [{**found["epochs"][0], **epoch, "never_count": 250}],
        **changes,
    }


def event(number: int, text: str = "w1 has joined") -> dict[str, Any]:
    kind = "worker_lost" if "lost" in text else "worker_joined"
    return {"number": number, "at_unix_s": 1e9, "kind": kind, "text": text}


def seen(**changes: object) -> Seen:
    found = Seen()
    found.take(document(**changes))
    found.events.extend(event(n) for n in range(5))
    return found


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10), (20, 4)])
def test_a_screen_has_what_fits_and_no_more(width: int, height: int) -> None:
    lines = frame(seen(), Choice(), width=width, height=height)
    assert len(lines) == height
    assert all(len(line.text) <= width for line in lines)
    assert lines[-1].text.startswith("q quit   tab pane")


def test_the_diagnosis_is_on_top_and_who_it_is_about_comes_first() -> None:
    lines = frame(seen(), Choice(), width=80, height=24)
    assert lines[0].text.startswith("job-1  running  ssp(3)  clock 120  1:02:05")
    assert lines[0].text.endswith("trainer:7070")
    merging = seen(mode="quorum", staleness_bound=None, quorum=4)
    head = frame(merging, Choice(), width=80, height=24)[0]
    assert head.text.startswith("job-1  running  quorum(4)  clock 120")
    assert lines[1] == Line(SENTENCE, Style.NOTICE)
    title = next(i for i, line in enumerate(lines) if line.text.startswith("WORKER"))
    assert lines[title].style is Style.CHOSEN
    assert lines[title + 1].text.startswith("w7 ")
    assert lines[title + 1].style is Style.NOTICE
    assert lines[title + 2].text.startswith("w0 ")
    text = "\n".join(line.text for line in lines)
    for words in ("12.5 steps/s", "1,600 samples/s", "loss 0.25", "accuracy 0.9"):
        assert words in text
    assert "epoch 3 of loader" in text
    assert "75 %  750 of 1,000" in text
    assert "COMPUTE" in text
    assert "no checkpoints are made" in text


def test_what_a_worker_waits_for_others_is_apart() -> None:
    slow = worker(1, answer_wait_ms=950.0, peer_wait_ms=1.0)
    new = worker(2, answer_wait_ms=None, peer_wait_ms=None)
    found = seen(workers=[worker(0), slow, new])
    title, *rows = whole_pane(found, "WORKER")
    names = title.split()
    shown = [dict(zip(names, re.split(r" {2,}", row), strict=True)) for row in rows]
    assert [(each["ANSWER"], each["OTHERS"]) for each in shown] == [
        ("10.0 ms", "240.0 ms"),
        ("949.0 ms", "1.0 ms"),
        ("-", "-"),
    ]
    assert {"COMPUTE", "DATA", "SEND"} < shown[0].keys()


def test_a_long_sentence_is_wrapped_and_tells_a_failure_once() -> None:
    failure = "shard 0: /mnt/checkpoints/" + "x" * 60 + ": No space left on device"
    sentence = f"The disk of the checkpoints is full: make room there; {failure}; end"
    found = seen(
        diagnosis={"cause": "disk", "sentence": sentence, "who": []},
        checkpoints={"interval": "10min", "newest": None, "failure": failure},
    )
    lines = frame(found, Choice(), width=80, height=24)
    text = " ".join(line.text for line in lines)
    assert "; end" in text
    assert text.count("No space left") == 1
    assert "CHECKPOINTS FAIL; no checkpoint yet" in text
    found.take(
        document(checkpoints={"interval": "10min", "newest": None, "failure": failure})
    )
    text = " ".join(line.text for line in frame(found, Choice(), width=80, height=24))
    assert "No space left on device; no checkpoint yet, one every 10min" in text


def test_a_strategy_has_a_line_of_its_own() -> None:
    plain = frame(seen(), Choice(), width=80, height=24)
    lines = frame(seen(strategy="DiLoCo\x1b[2J"), Choice(), width=80, height=24)
    assert lines[2] == Line(r"DiLoCo\x1b[2J")
    assert lines[3] == plain[2]
    assert len(lines) == len(plain)


def whole_pane(found: Seen, title: str) -> list[str]:
    """Lines of a pane on 80 columns, with its title."""
    texts = [line.text for line in whole(found, width=80)]
    first = next(i for i, text in enumerate(texts) if text.startswith(title))
    return texts[first : texts.index("", first)]


@pytest.mark.parametrize(
    ("cause", "style"),
    [
        ("training", Style.GOOD),
        ("slow_link", Style.NOTICE),
        ("shard_lost", Style.BAD),
        ("failed", Style.BAD),
        (None, Style.NOTICE),
    ],
)
def test_how_bad_it_is_can_be_seen(cause: str | None, style: Style) -> None:
    diagnosis: dict[str, Any] = {"cause": cause, "sentence": "so it is", "who": []}
    assert (
        frame(seen(diagnosis=diagnosis), Choice(), width=80, height=24)[1].style
        is style
    )


def test_workers_that_a_shard_waits_for_are_those_to_look_at() -> None:
    waiting = {"awaited": [{"name": "w3"}]}
    calm = {"cause": "training", "sentence": "", "who": ["w1"]}
    found = document(shards=[shard(0, waiting=waiting)], diagnosis=calm)
    assert attention(found) == {"w3"}


def test_lost_processes_and_bad_events_stand_out() -> None:
    found = seen(
        workers=[worker(0), worker(1, state="lost")], shards=[shard(0, state="lost")]
    )
    found.events.append(event(9, "w1 is lost"))
    bad = {
        line.text.split()[0]
        for line in whole(found, width=80)
        if line.style is Style.BAD
    }
    assert {"w1", "0"} < bad
    assert len(bad) == 3


def test_an_outage_is_told_in_place_of_the_diagnosis() -> None:
    found = seen()
    found.trouble, found.silent_s = "connection refused", 12.0
    line = frame(found, Choice(), width=80, height=24)[1]
    assert line.text.startswith("NO ANSWER for 12 s")
    assert line.style is Style.BAD
    found.take(document())
    assert frame(found, Choice(), width=80, height=24)[1].text == SENTENCE


def test_failing_checkpoints_are_told() -> None:
    newest = {"age_ms": 65_000, "version": 480, "byte_count": 1 << 20}
    made = {"interval": "10min", "newest": newest, "failure": None}
    text = "\n".join(line.text for line in whole(seen(checkpoints=made), width=80))
    assert "checkpoint 1:05 ago, version 480, 1.0 MiB, every 10min" in text
    made = {"interval": "10min", "newest": None, "failure": "disk full"}
    text = "\n".join(line.text for line in whole(seen(checkpoints=made), width=80))
    assert "CHECKPOINTS FAIL: disk full" in text


def test_a_job_before_its_first_worker_has_a_screen() -> None:
    found = seen(
        workers=[], epochs=[], metrics={}, steps_per_s=None, samples_per_s=None
    )
    text = "\n".join(line.text for line in frame(found, Choice(), width=80, height=24))
    assert "no workers" in text
    assert "no step yet" in text


def test_rows_are_shared_by_what_is_chosen() -> None:
    needs = {Pane.WORKERS: 200, Pane.SHARDS: 2, Pane.EVENTS: 100}
    assert heights(needs, Choice(), 14) == {
        Pane.WORKERS: 9,
        Pane.SHARDS: 2,
        Pane.EVENTS: 3,
    }
    assert heights(needs, Choice(Pane.EVENTS), 14)[Pane.EVENTS] == 9
    assert sum(heights(needs, Choice(), 2).values()) == 2
    few = {Pane.WORKERS: 1, Pane.SHARDS: 1, Pane.EVENTS: 1}
    assert sum(heights(few, Choice(), 14).values()) == 3


def test_keys_choose_a_pane_and_scroll_it() -> None:
    choice = Choice()
    found = seen(workers=[worker(n) for n in range(200)])
    for key in keys_in(b"jj\x1b[Bk"):
        choice.press(key)
    assert choice.first[Pane.WORKERS] == 2
    lines = frame(found, choice, width=80, height=24)
    assert lines[-1].text.endswith("workers 3 to 12 of 200")
    for _ in range(500):
        choice.press("j")
    lines = frame(found, choice, width=80, height=24)
    assert any(line.text.startswith("w199") for line in lines)
    assert choice.first[Pane.WORKERS] < 200, "it ends with the last row"
    choice.press("\t")
    assert choice.pane is Pane.SHARDS
    choice.press("left")
    choice.press("left")
    assert choice.pane is Pane.EVENTS


def test_names_can_not_steer_the_terminal() -> None:
    evil = "w\x1b[2Jx\n" + "y" * 1000
    diagnosis = {"cause": "straggler", "sentence": evil, "who": [evil]}
    found = seen(workers=[worker(0, worker_id=evil)], diagnosis=diagnosis)
    found.events.append(event(1, evil))
    for line in frame(found, Choice(), width=80, height=24):
        assert "\x1b" not in line.text
        assert "\n" not in line.text


def screen_of(painter: Painter, lines: list[Line], terminal: pyte.Stream) -> int:
    """Sends an update to a terminal; the bytes that it takes."""
    update = painter.update(lines, 80, 24)
    terminal.feed(update)
    return len(update.encode())


def shown_by(screen: pyte.Screen) -> list[str]:
    return [row.rstrip() for row in screen.display]


def test_a_terminal_shows_the_lines_and_is_sent_what_has_changed() -> None:
    screen = pyte.Screen(80, 24)
    terminal = pyte.Stream(screen)
    painter, found = Painter({"TERM": "xterm-256color"}), seen()
    first = frame(found, Choice(), width=80, height=24)
    assert 0 < screen_of(painter, first, terminal) < 4096
    assert [row.rstrip() for row in screen.display] == [
        line.text.rstrip() for line in first
    ]
    assert screen_of(painter, first, terminal) == 0

    workers = [worker(n, clock=121) for n in range(12)]
    found.take(document(workers=workers))
    second = frame(found, Choice(), width=80, height=24)
    assert 0 < screen_of(painter, second, terminal) < 2048
    assert shown_by(screen) == [line.text.rstrip() for line in second]


def test_another_size_is_painted_anew() -> None:
    painter = Painter({"TERM": "xterm"})
    lines = frame(seen(), Choice(), width=80, height=24)
    painter.update(lines, 80, 24)
    assert "\x1b[2J" in painter.update(lines, 100, 30)


def test_no_color_leaves_bold_and_reverse() -> None:
    lines = [Line("bad", Style.BAD), Line("chosen", Style.CHOSEN)]
    coloured = Painter({"TERM": "xterm-256color"}).update(lines, 80, 24)
    plain = Painter({"TERM": "xterm-256color", "NO_COLOR": "1"}).update(lines, 80, 24)
    assert "31m" in coloured
    assert "31m" not in plain
    assert "\x1b[1;7m" in plain


def test_a_time_that_is_none_ends_no_command() -> None:
    for unix_s in (float("nan"), float("inf"), 1e30):
        assert time_text(unix_s, "%H:%M:%S") == "at no time"


def test_curves_and_bars_have_a_form_in_ascii() -> None:
    assert sparkline([1, 2, 3], 8, unicode=True) == "▁▅█"
    assert sparkline([3.0, 3.0], 8, unicode=False) == "__"
    assert sparkline([1.0], 8, unicode=True) == ""
    assert sparkline([-1e308, 0.0, 1e308], 8, unicode=False) == "_-#"
    assert sparkline([0.0, 5e-324], 8, unicode=False) == "__"
    assert len(sparkline(list(range(100)), 20, unicode=True)) == 20
    assert progress_bar(0.5, 10, unicode=False) == "#####-----"
    assert progress_bar(7.0, 4, unicode=True) == "████"
