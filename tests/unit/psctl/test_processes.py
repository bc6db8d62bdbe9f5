"""Children are gone with their parent, however it ends."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from psctl.failures import CommandError
from psctl.processes import Children

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def _module(folder: Path, name: str, text: str) -> dict[str, str]:
    """Writes a module; the environment in which `python -m` finds it."""
    (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.02)


def test_lines_come_under_the_childs_name_and_end_with_none(tmp_path: Path) -> None:
    environment = _module(tmp_path, "talker", "print('one'); print('two')")
    with Children(tmp_path) as children:
        children.start("child", ["talker"], environment)
        lines = [children.next_line(60) for _ in range(3)]
    assert [(line.child, line.text) for line in lines if line] == [
        ("child", "one"),
        ("child", "two"),
        ("child", None),
    ]


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    environment = _module(tmp_path, "stubborn", STUBBORN)
    with Children(tmp_path) as children:
        children.start("child", ["stubborn"], environment)
        assert children.next_line(60) is not None
        pid = children.process_id("child")
    assert not psutil.pid_exists(pid)


def test_a_failed_child_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    environment = _module(tmp_path, "failing", "raise SystemExit('no disk')")
    with Children(tmp_path) as children:
        children.start("shard 0", ["failing"], environment)
        line = children.next_line(60)
        assert line is not None
        assert line.text is None
        while children.is_running("shard 0"):
            time.sleep(0.01)
        with pytest.raises(CommandError, match="no disk"):
            children.check()


def test_one_that_may_end_well_is_no_failure(tmp_path: Path) -> None:
    environment = _module(tmp_path, "quick", "")
    with Children(tmp_path) as children:
        children.start("worker", ["quick"], environment)
        assert children.next_line(60) is not None
        while children.is_running("worker"):
            time.sleep(0.01)
        children.check([])
        with pytest.raises(CommandError, match="exit code 0"):
            children.check(["worker"])


def test_a_killed_child_is_a_failure_unless_that_was_allowed(tmp_path: Path) -> None:
    environment = _module(tmp_path, "stubborn", STUBBORN)
    with Children(tmp_path) as children:
        children.start("child", ["stubborn"], environment)
        assert children.next_line(60) is not None
        children.kill("child")
        assert not children.is_running("child")
        assert children.was_killed("child")
        with pytest.raises(CommandError, match="child ended"):
            children.check([])
        children.allow_kill("child")
        children.check([])


def test_a_child_that_ended_is_started_again_with_more_options(tmp_path: Path) -> None:
    environment = _module(tmp_path, "echo", "import sys; print(sys.argv[1:])")
    with Children(tmp_path) as children:
        children.start("child", ["echo", "a"], environment)
        assert children.wait_ended("child", 60)
        assert not children.was_killed("child")
        children.restart("child", "--more")
        lines = [children.next_line(60) for _ in range(4)]
    told = {line.text for line in lines if line is not None}
    assert told == {"['a']", "['a', '--more']", None}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's request is Linux's")
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    environment = _module(tmp_path, "stubborn", STUBBORN)
    program = f"""
import sys, time
from pathlib import Path
from psctl.processes import Children
with Children(Path({str(tmp_path)!r})) as children:
    children.start("child", ["stubborn"], {environment!r})
    children.next_line(60)
    print(children.process_id("child"), flush=True)
    time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(60)
    _wait_gone(pid)
