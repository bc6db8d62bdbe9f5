import os
import subprocess
import sys

import pytest

HANDLERS = "GRPC_ENABLE_FORK_SUPPORT"


@pytest.mark.parametrize(
    ("given", "first", "expected"),
    [
        (None, "psworker", "0"),
        (None, "grpc", "0 warned"),
        ("0", "grpc", "0"),
        ("1", "psworker", "1"),
    ],
)
def test_grpc_does_nothing_at_a_fork_unless_a_user_says_so(
    given: str | None, first: str, expected: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != HANDLERS}
    if given is not None:
        environment[HANDLERS] = given
    program = (
        f"import os, {first}, psworker\n"
        "from psworker import fork_guard\n"
        "from pswire.addresses import Address\n"
        "fork_guard.guard(Address('127.0.0.1', 1))\n"
        f"print(os.environ[{HANDLERS!r}])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    warned = " warned" if "may crash; import psworker first" in done.stderr else ""
    assert done.stdout.strip() + warned == expected
