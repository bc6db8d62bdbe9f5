"""Starts a job's coordinator and shards on loopback, for a demo or a benchmark."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psctl.failures import CommandError
from psctl.processes import Children
from psctl.status import read_status
from pswire.addresses import Address, parse_address

START_TIMEOUT_S: Final = 30.0
"""Until the coordinator has told its port."""

DATA_SEED: Final = 20
"""Of the order of the data, so that a demo repeats."""

_POLL_S: Final = 0.1
_ADDRESS: Final = re.compile(r"127\.0\.0\.1:\d+")


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Addresses of a shard.

    Attributes:
        listens: Where it listens.
        is_reached: Where workers reach it.
    """

    listens: str
    is_reached: str


def daemon_names(shard_count: int) -> list[str]:
    """Names of the processes among the children."""
    return ["coordinator", *(f"shard {index}" for index in range(shard_count))]


def start_daemons(
    children: Children,
    scratch: Path,
    *,
    shard_count: int,
    worker_count: int,
    mode: str = "bsp",
    options: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    prefix: str = "",
    places: Sequence[ShardPlace] = (),
) -> Address:
    """Starts a coordinator and its shards; the coordinator's address.

    Args:
        children: To which they belong.
        scratch: Folder for their state.
        shard_count: Shards.
        worker_count: Workers that the job waits for.
        mode: How workers keep together.
        options: More options of the coordinator.
        environment: Added to that of this process.
        prefix: Of the names of the processes among the children.
        places: Where each shard listens and is reached; by default any free port.

    Raises:
        CommandError: The coordinator didn't start.
    """
    children.start(
        f"{prefix}coordinator",
        [
            *("psserver", "coordinator", "--listen", "127.0.0.1:0"),
            *("--state-dir", str(scratch / "coordinator")),
            *("--shards", str(shard_count), "--mode", mode),
            *("--min-workers", str(worker_count), "--seed", str(DATA_SEED)),
            *options,
        ],
        environment or {},
    )
    address = _told_address(children, f"{prefix}coordinator")
    for index in range(shard_count):
        place = places[index] if places else None
        children.start(
            f"{prefix}shard {index}",
            [
                *("psserver", "shard", "--coordinator", str(address)),
                *("--listen", place.listens if place else "127.0.0.1:0"),
                *(("--advertise", place.is_reached) if place else ()),
                *("--state-dir", str(scratch / f"shard-{index}")),
            ],
            environment or {},
        )
    return address


def is_listening_line(text: str | None) -> bool:
    """Whether a daemon's line tells that it listens."""
    return text is not None and _ADDRESS.search(text) is not None


def _told_address(children: Children, name: str) -> Address:
    deadline = time.monotonic() + START_TIMEOUT_S
    while (left_s := deadline - time.monotonic()) > 0:
        line = children.next_line(min(left_s, _POLL_S))
        children.check()
        if line is not None and line.child == name and line.text is not None:
            found = _ADDRESS.search(line.text)
            if found:
                return parse_address(found.group())
    raise CommandError(
        f"the coordinator did not report its port within {START_TIMEOUT_S:.0f} s"
    )


STALL_TIMEOUT_S: Final = 90.0
"""Without any step, after which a command says whom the job waits for and gives up. A
busy machine takes most of a minute to start the processes alone."""


def stalled(coordinator: Address) -> CommandError:
    """The failure, with whom the job waits for."""
    status = read_status(coordinator)
    return CommandError(
        f"no worker made a step for {STALL_TIMEOUT_S:.0f} s; the job is "
        f"{status.phase} and waits for {status.waiting_for or 'nobody'}"
    )
