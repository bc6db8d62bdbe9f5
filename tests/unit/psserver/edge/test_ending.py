"""Exit codes and last lines of the daemons."""

import pytest

from psserver.config import ConfigurationError, OptionError
from psserver.edge.ending import JobFailedError, run_daemon
from pswire.exit_codes import ExitCode
from pswire.reasons import ErrorReason, Refusal


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (None, ExitCode.DONE, ""),
        (OptionError("--shards 0"), ExitCode.USAGE, "--shards 0"),
        (ConfigurationError("no port"), ExitCode.BAD_CONFIGURATION, "no port"),
        (JobFailedError("a shard is gone"), ExitCode.PEER_UNAVAILABLE, "shard is gone"),
        (
            Refusal(ErrorReason.JOB_UNKNOWN, "another job"),
            ExitCode.PEER_UNAVAILABLE,
            "another job",
        ),
        (
            Refusal(ErrorReason.LIMIT_EXCEEDED, "no memory"),
            ExitCode.BAD_CONFIGURATION,
            "no memory",
        ),
        (Refusal(ErrorReason.PUSH_CONFLICT, "other bytes"), ExitCode.ERROR, "bytes"),
        (KeyError("x"), ExitCode.INTERNAL, "please report"),
    ],
)
def test_every_end_has_its_code_and_one_line(
    error: Exception | None,
    code: ExitCode,
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def daemon() -> None:
        if error is not None:
            raise error

    assert run_daemon(daemon()) == code
    said = capsys.readouterr().err
    assert said.count("psserver: ") == (error is not None)
    assert line in said
    assert "Traceback" not in said or code is ExitCode.INTERNAL
