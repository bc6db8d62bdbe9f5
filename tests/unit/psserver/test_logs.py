"""Lines that others can cause at will are few."""

import io
import logging
import sys

import pytest

from psserver.logs import (
    PEER_COUNT_MAX,
    PEER_PERIOD_S,
    REFUSAL_LINES_MAX,
    REFUSAL_PERIOD_S,
    PeerLog,
    RefusalLog,
    configure_logs,
)
from tests.doubles.manual_clock import ManualClock

LOG = logging.getLogger("psserver.test")


def test_a_period_has_few_lines_and_the_next_says_how_many_there_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    refusals = RefusalLog(LOG, clock)
    for number in range(1000):
        refusals.warning("refused %d", number)
    assert caplog.messages == [f"refused {n}" for n in range(REFUSAL_LINES_MAX)]

    clock.now_s += REFUSAL_PERIOD_S - 0.1
    refusals.warning("refused in the same period")
    caplog.clear()
    clock.now_s += 0.1
    refusals.warning("refused %s", "later")
    refusals.warning("refused then")

    left_out = 1001 - REFUSAL_LINES_MAX
    assert caplog.messages == [
        f"refused later ({left_out} lines like this were left out before)",
        "refused then",
    ]


def test_few_lines_are_all_written(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    refusals = RefusalLog(LOG, clock)
    for _ in range(20):
        clock.now_s += REFUSAL_PERIOD_S / REFUSAL_LINES_MAX
        refusals.warning("refused")
    assert caplog.messages == ["refused"] * 20


def test_each_peer_has_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    peers = PeerLog(LOG, clock)
    for _ in range(100):
        peers.warning("10.0.0.1", "why")
    peers.warning("10.0.0.2", "why")
    clock.now_s += PEER_PERIOD_S
    peers.warning("10.0.0.1", "why else")

    assert caplog.messages == [
        "a call from 10.0.0.1 is refused: why",
        "a call from 10.0.0.2 is refused: why",
        "a call from 10.0.0.1 is refused: why else (99 lines like this were left out "
        "before)",
    ]


def test_any_number_of_peers_has_a_bounded_number_of_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An IPv6 host has as many addresses as it likes."""
    clock = ManualClock()
    peers = PeerLog(LOG, clock)
    for number in range(10 * PEER_COUNT_MAX):
        peers.warning(f"peer {number}", "why")
    assert len(caplog.messages) == len(peers._logs) == PEER_COUNT_MAX + 1
    assert caplog.messages[-1] == "a call from other peers is refused: why"

    clock.now_s += PEER_PERIOD_S
    caplog.clear()
    peers.warning("one more", "why")
    assert caplog.messages == ["a call from one more is refused: why"]
    assert len(peers._logs) == 1


def test_an_error_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    RefusalLog(LOG, ManualClock()).warning("failed", error=OSError("x"))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


class Terminal(io.StringIO):
    """Takes what is written."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_name_begins_no_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(sys, "stderr", said := stream())
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setenv("NO_COLOR", "1")
    configure_logs(role="shard")

    logging.getLogger("psserver.test").info("worker %s", "a\nb\x1b[31m\u2028c")

    assert said.getvalue().count("\n") == 1
    assert "worker a" in said.getvalue()
    assert said.getvalue()[:-1].isprintable()
