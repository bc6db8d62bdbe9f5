"""Failpoints: what may be armed, and what happens at a hit."""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pswire import failpoints
from pswire.failpoints import (
    FAILPOINTS,
    ArmedFailpoints,
    Failpoint,
    FailpointError,
    arm,
    hit,
    parse_failpoints,
)

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm({})


def test_entries_are_read_in_order() -> None:
    assert parse_failpoints("worker.step=kill@40; shard.before_reply=delay(20);") == (
        Failpoint("worker.step", "kill", 0, 40),
        Failpoint("shard.before_reply", "delay", 20, 1),
    )


def test_nothing_arms_nothing() -> None:
    assert parse_failpoints("") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker.stepp=kill", "no failpoint 'worker.stepp'.*worker.step.*kill"),
        ("worker.step=explode", "'explode' is no action.*delay"),
        ("worker.step=exit", "'exit' is no action.*exit.CODE."),
        ("worker.step=kill(3)", "'kill.3.' is no action"),
        ("worker.step", "is not NAME=ACTION.*worker.step"),
        ("worker.step=kill@x", "is not NAME=ACTION"),
        ("worker.step=kill@" + "1" * 5000, "is not NAME=ACTION.*at most 9 digits"),
        ("worker.step=delay(1000000000)", "is not NAME=ACTION.*at most 9 digits"),
        ("worker.step=kill@0", "out of range"),
        ("worker.step=exit(256)", "out of range"),
    ],
)
def test_what_there_is_not_is_refused_with_the_list(text: str, said: str) -> None:
    with pytest.raises(FailpointError, match=said):
        parse_failpoints(text)


def test_unset_costs_no_more_than_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PS_FAILPOINT", raising=False)
    arm()
    assert failpoints.armed is None
    hit("worker.step")


def test_a_delay_comes_at_its_turn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr("pswire.failpoints.time.sleep", slept_s.append)
    points = ArmedFailpoints(parse_failpoints("worker.step=delay(30)@2"))
    counts = []
    for _ in range(3):
        points.hit("worker.step")
        counts.append(len(slept_s))
    assert (counts, slept_s) == ([0, 1, 1], [0.03])


def test_the_same_text_again_keeps_the_counts() -> None:
    environment = {"PS_FAILPOINT": "worker.step=delay(30)@2"}
    arm(environment)
    first = failpoints.armed
    arm(environment)
    assert failpoints.armed is first


@pytest.mark.parametrize(
    ("action", "code"), [("kill", -signal.SIGKILL), ("exit(7)", 7)]
)
def test_a_process_ends_as_told_and_says_where(action: str, code: int) -> None:
    script = (
        "from pswire import failpoints; failpoints.arm()\n"
        "failpoints.hit('worker.step'); print('once', flush=True)\n"
        "failpoints.hit('worker.step'); print('twice', flush=True)\n"
    )
    environment = dict(os.environ, PS_FAILPOINT=f"worker.step={action}@2")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "once\n")
    assert "failpoint worker.step, hit 2" in done.stderr


def test_a_stopped_process_goes_on_when_continued() -> None:
    script = (
        "from pswire import failpoints; failpoints.arm()\n"
        "failpoints.hit('worker.step'); print('went on', flush=True)\n"
    )
    environment = dict(os.environ, PS_FAILPOINT="worker.step=stop")
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate(timeout=120)
    assert said == "went on\n"


def names_in_code() -> set[str]:
    """First arguments of every `failpoints.hit(...)` in the libraries."""
    found = set()
    for folder in ("protos/pswire", "psserver", "psworker", "psctl"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "failpoints.hit(" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if (
                    isinstance(node, ast.Call)
                    and ast.unparse(node.func) == "failpoints.hit"
                ):
                    found.add(ast.literal_eval(node.args[0]))
    return found


def test_the_catalogue_is_what_the_code_has() -> None:
    assert names_in_code() == set(FAILPOINTS)
