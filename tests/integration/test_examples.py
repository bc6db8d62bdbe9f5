"""The example scripts do what the README says of them."""

import difflib
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BEFORE = EXAMPLES / "digits_before.py"
AFTER = EXAMPLES / "digits_after.py"


def accuracy(output: str) -> float:
    found = re.search(r"test accuracy ([\d.]+)", output)
    assert found, output
    return float(found.group(1))


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


def test_script_before_the_change_trains_alone() -> None:
    done = subprocess.run(
        [sys.executable, BEFORE], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 0.95
