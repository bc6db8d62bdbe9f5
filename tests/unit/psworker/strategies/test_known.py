"""The names of strategies on a command line."""

import subprocess
import sys

import psworker
from psworker.strategies.known import KNOWN, strategy_named


def test_every_name_is_of_a_public_strategy_and_all_have_one() -> None:
    classes = {strategy_named(name) for name in KNOWN}
    public = {getattr(psworker, each) for each in psworker.__all__}
    strategies = {
        each
        for each in public
        if isinstance(each, type)
        and issubclass(each, psworker.Strategy)
        and each is not psworker.Strategy
    }
    assert classes == strategies


def test_the_table_needs_no_torch() -> None:
    code = "import sys, psworker.strategies.known; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
