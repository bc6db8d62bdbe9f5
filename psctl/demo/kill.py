"""`--kill ROLE-INDEX@STEP`: which process of the demo dies, and what comes of it."""

import re
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from psctl.daemons import STALL_TIMEOUT_S, is_listening_line
from psctl.demo.progress import Progress, StepReport
from psctl.failures import CommandError
from psctl.processes import Children, Line
from pswire.addresses import Address
from pswire.exit_codes import ExitCode

EXAMPLES: Final = (
    "--kill worker-1@40 (the second worker, in its 40th step), --kill coordinator@40 "
    "or --kill shard-0@40 (when the job reaches step 40)"
)

_TEXT: Final = re.compile(r"(?P<role>[a-z]+)(-(?P<index>\d{1,4}))?@(?P<step>\d{1,9})")


class Role(StrEnum):
    WORKER = "worker"
    COORDINATOR = "coordinator"
    SHARD = "shard"


@dataclass(frozen=True, slots=True)
class Kill:
    """A process to kill.

    Attributes:
        step: A worker dies in this step of its own, any other process when the job
            has reached it.
    """

    role: Role
    index: int
    step: int

    @property
    def process_name(self) -> str:
        """Name of the process among the demo's children."""
        if self.role is Role.WORKER:
            return worker_name(self.index)
        return "coordinator" if self.role is Role.COORDINATOR else f"shard {self.index}"


def worker_name(index: int) -> str:
    return f"w{index}"


def parse_kill(text: str, *, worker_count: int, shard_count: int) -> Kill:
    """Reads the option.

    Raises:
        ValueError: No process can be killed so; the text has examples.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None or found["role"] not in list(Role):
        raise ValueError(f"{text!r} is not ROLE-INDEX@STEP; {EXAMPLES}")
    role, step = Role(found["role"]), int(found["step"])
    if found["index"] is None and role is not Role.COORDINATOR:
        raise ValueError(f"{text!r} does not say which {role}; {EXAMPLES}")
    index = int(found["index"] or 0)
    count = {Role.WORKER: worker_count, Role.SHARD: shard_count, Role.COORDINATOR: 1}
    if index >= count[role]:
        raise ValueError(
            f"there is no {role}-{index}: of {count[role]} the last one is "
            f"{role}-{count[role] - 1}"
        )
    if step < 1:
        raise ValueError(f"{text!r}: steps count from 1; {EXAMPLES}")
    if role is Role.WORKER and worker_count == 1:
        raise ValueError(
            "with one worker nobody is left to go on without it: say --workers 2 or "
            "more"
        )
    return Kill(role, index, step)


class Killing:
    def __init__(self, kill: Kill, children: Children, coordinator: Address) -> None:
        self.kill = kill
        self._children = children
        self._coordinator = coordinator
        self._killed_s: float | None = None
        self._killed_clock = 0
        self._closed_s: float | None = None
        self._listened_s: float | None = None
        self._listened_clock = 0

    def look(self, progress: Progress) -> None:
        """Kills a daemon once the job has reached its step."""
        if (
            self._killed_s is not None
            or self.kill.role is Role.WORKER
            or progress.clock < self.kill.step
        ):
            return
        self._note_death(progress)
        self._children.kill(self.kill.process_name)
        if self.kill.role is Role.SHARD:
            raise self._end_of_job()
        self._children.restart("coordinator", "--listen", str(self._coordinator))

    def take_line(self, line: Line, progress: Progress) -> None:
        if line.child != self.kill.process_name or self._listened_s is not None:
            return
        if self.kill.role is Role.WORKER and line.text is None:
            if self._children.was_killed(line.child):
                self._note_death(progress)
        elif self._killed_s is not None and is_listening_line(line.text):
            self._listened_s = time.monotonic()
            self._listened_clock = progress.frontier

    def take_report(self, report: StepReport) -> None:
        """Notes the first clock that closes after the death."""
        is_first = self._killed_s is not None and self._closed_s is None
        if is_first and report["frontier"] > self._killed_clock:
            self._closed_s = time.monotonic()

    def story(self, progress: Progress) -> str:
        name = self.kill.process_name
        if self._killed_s is None:
            return (
                f"{name} was not killed: the training ended before step "
                f"{self.kill.step}; say a smaller step or more --epochs"
            )
        lines = [
            ("next clock closed", _since(self._killed_s, self._closed_s)),
        ]
        if self.kill.role is Role.WORKER:
            title = f"{name} was killed with SIGKILL in its step {self.kill.step}"
            heirs = [each for each in sorted(progress.clocks) if each != name]
            lines.append(("trained the rest", " and ".join(heirs)))
        else:
            title = f"the {name} was killed with SIGKILL at step {self.kill.step}"
            closed = self._listened_clock - self._killed_clock
            lines += [
                ("listened again", _since(self._killed_s, self._listened_s)),
                ("clocks closed without it", f"{closed}"),
                ("took over", "its next start, from the same --state-dir"),
            ]
        return "\n".join([title, *(f"    {key:<24}  {text}" for key, text in lines)])

    def _note_death(self, progress: Progress) -> None:
        self._killed_s = time.monotonic()
        self._killed_clock = progress.frontier

    def _end_of_job(self) -> CommandError:
        """Waits for the job to end without the shard; the failure that says so."""
        began_s = time.monotonic()
        name = self.kill.process_name
        if not self._children.wait_ended("coordinator", STALL_TIMEOUT_S):
            return CommandError(
                f"{name} was killed at step {self.kill.step}, and "
                f"{STALL_TIMEOUT_S:.0f} s later the job had not ended; this is a bug "
                "of paramserver",
                ExitCode.INTERNAL,
            )
        took_s = time.monotonic() - began_s
        said = self._children.log_tail("coordinator").splitlines()[-1]
        return CommandError(
            f"{name} was killed with SIGKILL at step {self.kill.step}.\n"
            "Its values are lost with it, and the demo makes no checkpoints: that ends "
            f"the job, as it did here\n{took_s:.1f} s later. With --checkpoint-dir, "
            f"psserver goes on from the newest one. The coordinator said:\n{said}",
            ExitCode.PEER_UNAVAILABLE,
        )


def _since(began_s: float, at_s: float | None) -> str:
    return "never" if at_s is None else f"{at_s - began_s:.2f} s later"
