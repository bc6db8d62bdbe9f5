"""`psctl demo` as a newcomer runs it: real processes, real data, nothing left.

Those of two tests are started, as the newcomer's are; the others' are forked.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from psctl.demo.tasks import load_task
from tests.doubles.children import Completed, Nursery

COMMAND = [sys.executable, "-m", "psctl", "demo"]
TWELVE_EPOCHS = ("--epochs", "12", "--out", "model")

Run = Callable[..., Completed]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One whose temporary files are all under one folder."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    return {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def run(nursery: Nursery, tmp_path: Path, environment: dict[str, str]) -> Run:
    """Runs the demo, forked as its processes are, in the folder of the test."""
    temporary = {"TMPDIR": environment["TMPDIR"]}

    def run_demo(*arguments: str) -> Completed:
        return nursery.run(
            *("-m", "psctl", "demo", *arguments),
            working=tmp_path,
            environment=temporary,
            launches=True,
            timeout_s=250,
        )

    return run_demo


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Checks that no process and no temporary file outlives the demo."""
    yield
    assert list((tmp_path / "tmp").iterdir()) == []
    left = [
        process.cmdline()
        for process in psutil.process_iter(["cwd"])  # a zombie has none
        if process.info["cwd"] == str(tmp_path)
    ]
    assert left == []


def test_the_demo_trains_the_same_as_one_process(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "model.safetensors"
    done = run("--secure", "--workers", "2", "--epochs", "3", "--out", str(out))
    assert done.returncode == 0, done.stderr
    figures = dict(
        re.findall(r"^(test accuracy of .+?|largest .+?)  +(\S+)$", done.stdout, re.M)
    )
    accuracy, reference, difference = map(float, figures.values())
    assert accuracy == reference
    assert accuracy > 0.8
    assert difference < 1e-6
    assert "mode bsp: 69 steps" in done.stdout
    assert str(out) in done.stdout
    assert done.stdout.count("\n    + ") == 4
    # Progress is plain lines, since stderr is a file here.
    assert "steps/s" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    task = load_task("digits")
    model = task.build_model()
    model.load_state_dict(load_file(out), strict=True)
    assert task.accuracy(model) == pytest.approx(accuracy, abs=1e-4)


# Twice what the demo calls fine: 12 epochs leave more to chance than its 30.
POINTS_MAX = 4


def _figure(name: str, text: str) -> float:
    found = re.search(rf"^ *{name}  +([0-9.]+)", text, re.M)
    assert found is not None, text
    return float(found.group(1))


def test_a_killed_worker_is_taken_out_and_the_accuracy_is_as_good(
    run: Run,
) -> None:
    done = run(
        *(*TWELVE_EPOCHS, "--workers", "2", "--shards", "1"),
        *("--mode", "ssp", "--kill", "worker-1@40"),
    )
    assert done.returncode == 0, done.stderr
    assert "mode ssp(3): " in done.stdout
    assert "w1 was killed with SIGKILL in its step 40" in done.stdout
    assert _figure("next clock closed", done.stdout) < 11  # the lease and 1 s
    assert "trained the rest          w0\n" in done.stdout
    assert _figure("test accuracy of the pulled snapshot", done.stdout) > 0.85
    assert _figure("difference in points", done.stdout) <= POINTS_MAX


@pytest.mark.repeat
def test_training_goes_on_while_the_coordinator_starts_again(
    run: Run,
) -> None:
    done = run(
        *(*TWELVE_EPOCHS, "--workers", "2", "--shards", "1"),
        *("--mode", "asp", "--kill", "coordinator@50"),
    )
    assert done.returncode == 0, done.stderr
    assert "the coordinator was killed with SIGKILL at step 50" in done.stdout
    # Which is first is a matter of time: small steps soon use up what was leased ahead.
    assert _figure("listened again", done.stdout) > 0
    assert _figure("next clock closed", done.stdout) > 0
    assert _figure("test accuracy of the pulled snapshot", done.stdout) > 0.85
    assert _figure("difference in points", done.stdout) <= POINTS_MAX


@pytest.mark.repeat
def test_a_killed_shard_ends_the_job_and_says_so(tmp_path: Path, run: Run) -> None:
    done = run(*TWELVE_EPOCHS, "--workers", "1", "--kill", "shard-1@20")
    assert done.returncode == 69
    assert "shard 1 was killed with SIGKILL at step 20" in done.stderr
    assert "the demo makes no checkpoints: that ends the job" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "model").exists()


def test_a_step_after_the_end_is_told_before_anything_starts(run: Run) -> None:
    done = run(*TWELVE_EPOCHS, "--kill", "worker-1@180")
    assert done.returncode == 2
    assert "about 180 steps in 12 epochs" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_within_five_seconds(
    number: signal.Signals, tmp_path: Path, environment: dict[str, str]
) -> None:
    with subprocess.Popen(
        # More than it could train before the signal comes.
        [*COMMAND, "--workers", "2", "--shards", "1", "--epochs", "10000"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stderr is not None
        # In the middle of the training, or while its processes still start.
        wanted = "steps/s" if number == signal.SIGINT else "starting"
        for line in demo.stderr:
            if wanted in line:
                break
        children = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(number)
        assert demo.wait(90) == 130
        assert demo.stdout is not None
        assert demo.stdout.read() == ""
        assert "Traceback" not in demo.stderr.read()
    assert not any(child.is_running() for child in children)
    assert not (tmp_path / "paramserver-demo.safetensors").exists()


def test_a_folder_that_is_missing_is_told_before_anything_starts(
    tmp_path: Path, run: Run
) -> None:
    done = run("--out", str(tmp_path / "no" / "model.safetensors"))
    assert done.returncode == 2
    assert "there is no folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_temporary_files_really_are_where_the_test_looks(
    nursery: Nursery, tmp_path: Path, environment: dict[str, str]
) -> None:
    program = "import tempfile; print(tempfile.gettempdir())"
    started = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    forked = nursery.run(
        *("-c", program),
        environment={"TMPDIR": environment["TMPDIR"]},
    )
    for told in (started, forked):
        assert told.stdout.strip() == environment["TMPDIR"] != tempfile.gettempdir()
