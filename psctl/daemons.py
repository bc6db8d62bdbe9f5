"""Starts a job's coordinator and shards on loopback, for a demo or a benchmark."""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from psctl.failures import CommandError
from psctl.processes import Children, Line
from psctl.protection import Protection
from psctl.status import read_document
from psserver.job_options import JobOptions
from pswire.addresses import Address, parse_address
from pswire.config_file import variable_of

START_TIMEOUT_S: Final = 30.0
"""Until the coordinator has reported its port."""

STALL_TIMEOUT_S: Final = 90.0
"""Without any step, after which a command ends. On a busy machine the start of the
processes alone takes most of a minute."""

DATA_SEED: Final = 20
"""Of the order of the data, so that a demo repeats."""

_POLL_S: Final = 0.1
_ADDRESS: Final = re.compile(r"127\.0\.0\.1:\d+")


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Addresses of a shard: where it listens, and where workers reach it."""

    listens: str
    is_reached: str


def daemon_names(shard_count: int) -> list[str]:
    return ["coordinator", *(f"shard {index}" for index in range(shard_count))]


def start_daemons(
    children: Children,
    scratch: Path,
    *,
    shard_count: int,
    worker_count: int,
    mode: str = "bsp",
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    prefix: str = "",
    places: Sequence[ShardPlace] = (),
    protection: Protection | None = None,
) -> Address:
    """Starts a coordinator and its shards; the coordinator's address.

    What this process proved itself with before is for other jobs: from now on it has
    what it needs for this one, and so has what it starts.

    Args:
        children: To which they belong.
        scratch: Folder for their state.
        shard_count: Shards.
        worker_count: Workers that the job waits for.
        mode: How workers keep together.
        options: More options of the coordinator.
        environment: Added to that of this process.
        prefix: Of the processes' names among the children.
        places: Where each shard listens and is reached; by default any free port.
        protection: Of the job, None for none.
    """
    protection = protection or Protection()
    os.environ.update(protection.admin)
    # What a variable says of a job is meant for another one.
    unset = {variable_of(each.name): "" for each in fields(JobOptions)}
    environment = {**unset, **protection.daemons, **(environment or {})}
    children.start(
        f"{prefix}coordinator",
        [
            *("psserver", "coordinator", "--listen", "127.0.0.1:0"),
            *("--state-dir", str(scratch / "coordinator")),
            *("--shards", str(shard_count), "--mode", mode),
            *("--min-workers", str(worker_count), "--seed", str(DATA_SEED)),
            *options,
        ],
        environment,
    )
    found = children.line_of(f"{prefix}coordinator", START_TIMEOUT_S, _ADDRESS)
    if found is None:
        raise CommandError(
            f"the coordinator did not report its port within {START_TIMEOUT_S:.0f} s"
        )
    address = parse_address(found.group())
    for index in range(shard_count):
        place = places[index] if places else None
        children.start(
            f"{prefix}shard {index}",
            [
                *("psserver", "shard", "--coordinator", str(address)),
                *("--index", str(index)),
                *("--listen", place.listens if place else "127.0.0.1:0"),
                *(("--advertise", place.is_reached) if place else ()),
                *("--state-dir", str(scratch / f"shard-{index}")),
            ],
            environment,
        )
    return address


def is_listening_line(text: str | None) -> bool:
    """Whether a daemon has printed that it listens."""
    return text is not None and _ADDRESS.search(text) is not None


def lines_until_all_end(
    children: Children,
    worker_names: Sequence[str],
    *,
    shard_count: int,
    coordinator: Address,
) -> Iterator[Line | None]:
    """Lines of all processes until all workers have ended well.

    Yields `None` when there was no line for a moment.
    """
    running = set(worker_names)
    heard_s = time.monotonic()
    while running:
        line = children.next_line(_POLL_S)
        children.check(daemon_names(shard_count))
        if line is not None and line.child in running:
            heard_s = time.monotonic()
            if line.text is None:
                running.discard(line.child)
        elif time.monotonic() - heard_s > STALL_TIMEOUT_S:
            status = read_document(coordinator)
            raise CommandError(
                f"no worker made a step for {STALL_TIMEOUT_S:.0f} s; the job is "
                f"{status['phase']} and waits for "
                f"{status['waiting_for'] or 'nobody'}"
            )
        yield line
