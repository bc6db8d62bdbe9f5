import multiprocessing
import os
import subprocess
import sys

import pytest

from psworker import fork_guard
from psworker.connecting import connect
from psworker.errors import ConfigurationError

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
        timeout=120,
    )

    warned = " warned" if "may crash; import psworker first" in done.stderr else ""
    assert done.stdout.strip() + warned == expected


def test_a_script_that_a_spawned_process_imports_does_not_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait in `prepare` for a job that waits for the parent to go on."""
    assert not fork_guard.is_importing_main()
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_inheriting", True, raising=False)
    with pytest.raises(ConfigurationError, match='if __name__ == "__main__"'):
        connect("127.0.0.1:1")
