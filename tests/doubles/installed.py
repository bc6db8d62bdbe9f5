"""What a test needs beside the library: without it the test skips and says why."""

import os
from importlib.util import find_spec
from typing import Final

import pytest

HEAVY: Final = "`CI=true make test` installs it"
"""How that is which a developer need not have."""


def need(module: str, how: str) -> None:
    """Skips this test, or this file of tests, where a module is not installed.

    Args:
        module: Its name.
        how: What installs it.
    """
    if find_spec(module.partition(".")[0]) is None:
        skip_or_fail(f"{module} is not installed: {how}")


def skip_or_fail(reason: str) -> None:
    """Skips, or fails where CI runs: there `make test` installs all that tests need."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)
