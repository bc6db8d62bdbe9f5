"""What a daemon prints may have no reader any more."""

import os
import subprocess
import sys

SCRIPT = """
from psserver.edge.lifecycle import print_line
print_line("first")
print_line("second")
"""


def test_a_line_that_nobody_reads_is_no_failure() -> None:
    """As after the kill of the supervisor that had the other end of the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")
