"""What is said of a coordinator that nobody reaches yet."""

import socket
from types import SimpleNamespace

import pytest

from pswire.addresses import Address
from psworker.errors import ConnectError
from psworker.launch import reachability
from psworker.launch.reachability import Cause, Problem, wait_reachable, waiting_text

ADDRESS = Address("127.0.0.1", 7070)


def test_a_refused_connection_reads_as_a_coordinator_that_has_not_started() -> None:
    refused = Problem(Cause.REFUSED, "connection refused; start it")
    assert waiting_text(ADDRESS, refused, 2.1, 8.0) == (
        "waiting for the coordinator at 127.0.0.1:7070: connection refused (nothing "
        "listens there yet); 2 s so far, at most 8 s"
    )


def test_any_other_trouble_is_said_as_it_is() -> None:
    trouble = Problem(Cause.OTHER, "no answer at all")
    assert ": no answer at all; 7 s so far" in waiting_text(ADDRESS, trouble, 7.0, 8.0)


def test_a_wait_for_the_coordinator_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reachability, "_RETRY_INTERVAL_S", 0.01)
    clock = [0.0]
    monkeypatch.setattr(
        reachability, "time", SimpleNamespace(monotonic=lambda: clock[0])
    )
    said: list[str] = []

    def log(line: str) -> None:
        said.append(line)
        clock[0] += 60

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ConnectError, match="connection refused"):
            wait_reachable(address, 60, log=log, first_notice_s=0.0)

    (line,) = said
    assert line.startswith(f"waiting for the coordinator at {address}: ")
