"""Named places in the code where a process can be made to die, stop or wait.

`PS_FAILPOINT` arms them, for tests of what a job survives:

    PS_FAILPOINT="worker.push_sent=kill@3;worker.step=delay(200)@5"

kills the process the third time that it has sent all of a push, and holds up its fifth
step by 0.2 s. More in `docs/failpoints.md`. A place in the code is two lines,

    if failpoints.armed:
        failpoints.hit("worker.push_sent")

so that a process without failpoints only reads one attribute.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

FAILPOINT_VARIABLE: Final = "PS_FAILPOINT"

FAILPOINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "worker.joined": "The worker is a member and holds the job's values.",
        "worker.step": "A step begins: nothing of its push is sent.",
        "worker.chunk_sent": "A message of a push is sent to a shard.",
        "worker.push_sent": "All of a push is sent to a shard; no answer yet.",
        "worker.push_answered": "A shard's answer arrived and is not processed yet.",
        "worker.in_barrier": "All of a push is sent to all shards; others decide.",
        "worker.staged": "Every shard holds all of the clock; no commit is sent.",
        "coordinator.write_durable": "A write is durable; nothing of it is sent.",
        "coordinator.fence_prepared": "A fence is opened and sent to no shard yet.",
        "coordinator.record_persisted": "A record is durable and sent to nobody yet.",
        "coordinator.record_announced": "A record is queued on all watches.",
        "coordinator.cut_decided": "A cut is decided and sent to no shard yet.",
        "coordinator.checkpoint_decided": "A checkpoint's cut is decided, not sent.",
        "coordinator.checkpoint_parts": "All shards have written; no manifest yet.",
        "coordinator.checkpoint_committed": "The manifest is durable; nobody knows.",
        "shard.push_received": "A message of a push has arrived and is not staged.",
        "shard.chunk_applied": "A chunk's values have changed and are sent to nobody.",
        "shard.before_reply": "The answer to a push is made and not sent yet.",
        "shard.checkpoint_copied": "All is copied for a checkpoint; beside training.",
        "shard.checkpoint_written": "A part of a checkpoint is durable; nobody knows.",
        "shard.restore_read": "A chunk of a checkpoint is read and not staged yet.",
        "checkpoint.begun": "A checkpoint is named; nothing of it is written.",
        "checkpoint.file_written": "A file of a checkpoint is written, not durable.",
        "checkpoint.file_synced": "Its bytes are durable; it has not got its name.",
        "checkpoint.file_renamed": "It has its name, which is not durable.",
        "checkpoint.file_durable": "A file is durable under its name.",
        "checkpoint.complete": "The manifest is durable; nothing says so yet.",
        "checkpoint.file_removed": "A file of a checkpoint is deleted; others follow.",
    }
)
"""Every failpoint with what is true there."""

ACTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kill": "SIGKILL to this process",
        "stop": "SIGSTOP to this process; SIGCONT continues it",
        "exit(CODE)": "end at once with an exit code, with no clean-up",
        "delay(MS)": "block the thread that reaches the place, in milliseconds",
    }
)
"""Every action with what it does."""

_ENTRY: Final = re.compile(
    r"(?P<name>[a-z_.]+)=(?P<action>[a-z]+)"
    r"(\((?P<argument>[0-9]{1,9})\))?(@(?P<turn>[0-9]{1,9}))?"
)
_TAKES_ARGUMENT: Final = {"kill": False, "stop": False, "exit": True, "delay": True}
_EXIT_CODE_MAX: Final = 255
_STDERR: Final = 2


class FailpointError(ValueError):
    """`PS_FAILPOINT` can't be understood; the text says why and what there is."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """What happens at one turn of one place.

    Attributes:
        name: The place.
        action: `kill`, `stop`, `exit` or `delay`.
        argument: Exit code or milliseconds; 0 for the others.
        turn: At which hit, from 1.
    """

    name: str
    action: str
    argument: int
    turn: int


def parse_failpoints(text: str) -> tuple[Failpoint, ...]:
    """Reads the value of `PS_FAILPOINT`.

    Raises:
        FailpointError: It names a place or an action that there is not.
    """
    entries = [entry.strip() for entry in text.split(";")]
    return tuple(_parse(entry) for entry in entries if entry)


def _parse(entry: str) -> Failpoint:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise FailpointError(
            f"{FAILPOINT_VARIABLE}: {entry[:64]!r} is not NAME=ACTION or "
            "NAME=ACTION@N, with numbers of at most 9 digits; " + _choices()
        )
    name, action, argument = found["name"], found["action"], found["argument"]
    if name not in FAILPOINTS:
        raise FailpointError(
            f"{FAILPOINT_VARIABLE}: there is no failpoint {name[:64]!r}; " + _choices()
        )
    wants = _TAKES_ARGUMENT.get(action)
    if wants is None or wants is not (argument is not None):
        given = action if argument is None else f"{action}({argument})"
        raise FailpointError(
            f"{FAILPOINT_VARIABLE}: {given!r} is no action; " + _choices()
        )
    number, turn = int(argument or 0), int(found["turn"] or 1)
    if turn < 1 or (action == "exit" and number > _EXIT_CODE_MAX):
        raise FailpointError(
            f"{FAILPOINT_VARIABLE}: {entry!r} is out of range: hits count from 1, and "
            f"exit codes end at {_EXIT_CODE_MAX}"
        )
    return Failpoint(name, action, number, turn)


def _choices() -> str:
    return f"places are {', '.join(FAILPOINTS)}; actions are {', '.join(ACTIONS)}"


class ArmedFailpoints:
    """Failpoints of one process, and how often each place was reached."""

    def __init__(self, failpoints: tuple[Failpoint, ...]) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._by_turn = {(each.name, each.turn): each for each in failpoints}

    def hit(self, name: str) -> None:
        """Counts a hit, and does what this one is armed with."""
        with self._lock:
            turn = self._counts[name] = self._counts.get(name, 0) + 1
        failpoint = self._by_turn.get((name, turn))
        if failpoint is not None:
            _act(failpoint)


def _act(failpoint: Failpoint) -> None:
    name, turn, action = failpoint.name, failpoint.turn, failpoint.action
    # Past every buffer, since some actions leave no time to empty one.
    os.write(_STDERR, f"paramserver: failpoint {name}, hit {turn}: {action}\n".encode())
    match failpoint.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(failpoint.argument)
        case "delay":
            time.sleep(failpoint.argument / 1000)


armed: ArmedFailpoints | None = None
"""Failpoints of this process, None while there are none."""

_armed_text = ""


def arm(environ: Mapping[str, str] | None = None) -> None:
    """Arms what `PS_FAILPOINT` says. The same text again keeps the counts.

    Raises:
        FailpointError: It can't be understood.
    """
    global armed, _armed_text
    text = (os.environ if environ is None else environ).get(FAILPOINT_VARIABLE, "")
    if text != _armed_text:
        failpoints = parse_failpoints(text)
        armed = ArmedFailpoints(failpoints) if failpoints else None
        _armed_text = text


def hit(name: str) -> None:
    """Counts a hit of a place and does what is armed there, if anything is."""
    if armed is not None:
        armed.hit(name)
