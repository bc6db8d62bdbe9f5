"""The example scripts do what the README says of them."""

import difflib
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.job import Job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BEFORE = EXAMPLES / "digits_before.py"
AFTER = EXAMPLES / "digits_after.py"


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"test accuracy ([\d.]+)", output)]


def run(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_going_distributed_takes_four_lines() -> None:
    changes = [
        line
        for line in difflib.ndiff(
            BEFORE.read_text().splitlines(), AFTER.read_text().splitlines()
        )
        if line.startswith(("+ ", "- "))
    ]
    assert [line for line in changes if line.startswith("- ")] == []
    assert len(changes) <= 4


def test_the_gallery_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    named = set(re.findall(r"`(\w+\.(?:py|ipynb))`", page))
    assert named == files - {"README.md"}


def test_the_cells_of_the_notebook_train_a_worker(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Here they are lines of a script; `test_notebooks.py` is of what a kernel adds."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    given: dict[str, object] = {}
    with Job(tmp_path) as job:
        monkeypatch.setenv("PS_COORDINATOR", job.address)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [], "a notebook is committed without outputs"
                exec("".join(cell["source"]), given)
    accuracy, clock = re.findall(
        r"accuracy ([\d.]+), clock (\d+)", capsys.readouterr().out
    )[0]
    assert float(accuracy) > 0.8
    assert int(clock) == 3 * 29


# The page in README.md trains them, and `tests/conformance` compares others alone.
@pytest.mark.repeat
def test_scripts_reach_the_same_accuracy_alone_and_as_two_workers(
    tmp_path: Path,
) -> None:
    alone = run(BEFORE)
    assert run(AFTER) == alone, "without a coordinator nothing is different"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    servers = subprocess.Popen(
        [
            *(sys.executable, "-m", "psserver", "local", "--shards", "2"),
            *(
                "--listen",
                address,
                "--state-dir",
                tmp_path,
                "--min-workers",
                "2",
                "--seed",
                "7",
            ),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        together = run(
            *("-m", "psworker", "run", "--coordinator", address, "--nproc", "2"),
            *("--", AFTER),
        )
    finally:
        servers.terminate()
        assert servers.wait(15) == 0
    (expected,) = accuracies(alone)
    assert expected > 0.95
    assert len(accuracies(together)) == 2
    for reached in accuracies(together):
        # Two batches make a step here, so there are half as many steps.
        assert abs(reached - expected) <= 0.02
