"""What `psworker run` refuses before it waits for anything."""

import re
import sys

import pytest
from typer.testing import CliRunner

from pswire.limits import NAME_BYTES_MAX
from psworker.__main__ import app
from psworker.launch.launched import PROCESS_COUNT_MAX


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--nproc", str(PROCESS_COUNT_MAX + 1), "--one-push-per-host"),
            "makes one worker of at most 256 processes, not 257",
        ),
        (
            ("--worker-id", "ü" * (NAME_BYTES_MAX // 2) + "x"),
            "has 1025 bytes in UTF-8, of at most 1024: give another one",
        ),
        (
            # The last of eleven is called ID-10.
            ("--worker-id", "x" * (NAME_BYTES_MAX - 2), "--nproc", "11"),
            "has 1025 bytes in UTF-8, of at most 1024: give another one",
        ),
    ],
)
def test_what_the_job_would_refuse_later_is_a_usage_error_at_once(
    options: tuple[str, ...], text: str
) -> None:
    # Port 1: whoever got as far as to wait for the coordinator would exit with 69.
    command = ["run", "--coordinator", "127.0.0.1:1", "--connect-timeout", "0"]

    done = CliRunner().invoke(app, [*command, *options, "--", __file__])

    assert done.exit_code == 2
    assert text in re.sub(r"\s+", " ", done.stderr)


@pytest.mark.parametrize(
    "interpreter",
    ["python", "python3.11", sys.executable],
    ids=["name", "version", "path"],
)
def test_an_interpreter_is_no_script(interpreter: str) -> None:
    command = ["run", "--coordinator", "127.0.0.1:1", "--connect-timeout", "0"]

    done = CliRunner().invoke(app, [*command, "--", interpreter, __file__])

    assert done.exit_code == 2
    assert "the script runs with this Python" in re.sub(r"\s+", " ", done.stderr)


def test_the_longest_worker_id_is_no_usage_error() -> None:
    command = ["run", "--coordinator", "127.0.0.1:1", "--connect-timeout", "0"]
    longest = ["--worker-id", "x" * NAME_BYTES_MAX]

    assert CliRunner().invoke(app, [*command, *longest, "--", __file__]).exit_code == 69
