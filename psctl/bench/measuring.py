"""Runs one workload: what it talks to, its members, and what they tell."""

import json
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from psctl.bench.figures import WorkloadFigures, slowest
from psctl.bench.limited_link import limited_link
from psctl.bench.machine import free_port
from psctl.bench.workload import (
    WARM_UP_COUNT,
    CannotRunError,
    Ground,
    Sizes,
    Workload,
)
from psctl.failures import CommandError
from psctl.processes import STOP_TIMEOUT_S, Children

SILENCE_S_MAX: Final = 120.0
"""Time without a word from any member after which a workload counts as stuck."""

_POLL_S: Final = 0.2


def measure_workload(
    workload: Workload, sizes: Sizes, scratch: Path
) -> WorkloadFigures:
    """Measures a workload; one that fails says why in its figures.

    Args:
        workload: What to measure.
        sizes: How much of it.
        scratch: An empty folder for its files.
    """
    began = time.monotonic()
    link_text = ""
    try:
        with ExitStack() as stack:
            link = None
            if workload.link_mbit is not None:
                link = stack.enter_context(limited_link(workload.link_mbit))
                link_text = link.text
            children = stack.enter_context(
                Children(scratch, prefix=() if link is None else link.prefix)
            )
            told = _Told(workload.member_count)
            ground = Ground(children, scratch, sizes, workload.environment, link)
            names = _start(workload, ground)
            _listen(children, names, told)
        durations_s = told.durations_s()
        cannot, failure = told.cannot, ""
    except (CommandError, CannotRunError) as error:
        durations_s, cannot, failure = {}, {}, str(error)
    return WorkloadFigures(
        workload=workload,
        durations_s=durations_s,
        cannot=cannot,
        failure=failure,
        link=link_text,
        took_s=time.monotonic() - began,
    )


class _Told:
    """What the members have told so far."""

    def __init__(self, member_count: int) -> None:
        self.cannot: dict[str, str] = {}
        self._seconds: list[dict[str, list[float]]] = [
            defaultdict(list) for _ in range(member_count)
        ]

    def take(self, rank: int, text: str) -> None:
        """Takes a line of a member."""
        if not text.startswith("{"):
            return  # Gloo greets its peers on stdout.
        message = json.loads(text)
        if "cannot" in message:
            self.cannot[message["cannot"]] = message["why"]
        else:
            self._seconds[rank][message["contender"]].append(message["seconds"])

    def durations_s(self) -> dict[str, list[float]]:
        """By contender, of each repetition the time of the slowest member."""
        return {
            name: slowest([of_member[name] for of_member in self._seconds])
            for name in self._seconds[0]
        }


def _start(workload: Workload, ground: Ground) -> list[str]:
    """Starts everything; the names of the members among the children."""
    settings = {
        "sizes": ground.sizes.to_json(),
        "places": workload.start(ground),
        "group_port": free_port(),
        "warm_up_count": WARM_UP_COUNT,
    }
    names = [f"member {rank}" for rank in range(workload.member_count)]
    for rank, name in enumerate(names):
        ground.start(
            name,
            *(workload.member_module, workload.name, str(rank), json.dumps(settings)),
        )
    return names


def _listen(children: Children, names: list[str], told: _Told) -> None:
    """Takes what members tell until all have ended well.

    Raises:
        CommandError: One failed, or something that it talks to, or all are silent.
    """
    running = set(names)
    heard = time.monotonic()
    while running:
        line = children.next_line(_POLL_S)
        if line is not None and line.child in names:
            heard = time.monotonic()
            if line.text is not None:
                told.take(names.index(line.child), line.text)
            else:
                running.remove(line.child)
                children.wait_ended(line.child, STOP_TIMEOUT_S)
        children.check(names=())
        if time.monotonic() - heard > SILENCE_S_MAX:
            tails = "\n".join(f"{name}: {children.log_tail(name)}" for name in names)
            raise CommandError(
                f"no member said anything for {SILENCE_S_MAX:.0f} s, so the workload "
                f"was given up; the ends of their logs:\n{tails}"
            )
