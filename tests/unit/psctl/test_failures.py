import pytest

from psctl.failures import CommandError, exit_code_of, report
from pswire.reasons import ErrorReason
from psworker.errors import (
    ConfigurationError,
    ConnectError,
    JobFailedError,
    PsError,
    ServerError,
    ShardLostError,
    SnapshotGoneError,
    UnavailableError,
    VersionMismatchError,
    WaitTimeoutError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PsError("x"), 1),
        (JobFailedError("x"), 1),
        (OSError("x"), 1),
        (CommandError("x"), 1),
        (ConnectError("x"), 69),
        (UnavailableError("x"), 69),
        (ShardLostError("x"), 69),
        (UnavailableError("x", reason=ErrorReason.NOT_STARTED), 75),
        (ServerError("x"), 70),
        (RuntimeError("x"), 70),
        (WaitTimeoutError("x"), 75),
        (SnapshotGoneError("x"), 75),
        (VersionMismatchError("x"), 76),
        (ConfigurationError("x"), 78),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_failure_has_its_exit_code(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


def test_a_failure_is_one_screen_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report(ConnectError("no route; " * 1000), debug=False) == 69
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("psctl: no route")
    assert "Traceback" not in printed.err
    assert len(printed.err) < 2100


def test_a_bug_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(KeyError("clock"), debug=False) == 70
    printed = capsys.readouterr().err
    assert "KeyError: 'clock'" in printed
    assert "--debug" in printed


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ConnectError("no route")
    except ConnectError as error:
        report(error, debug=True)
    assert "Traceback" in capsys.readouterr().err
